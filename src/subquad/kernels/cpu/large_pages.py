"""Whether the C++ engine asks the system for large pages of memory (2 MB instead of 4 kB) for its results.

Results are fresh memory at every call, and pages of 4 kB cost up to a third of the time of `linear`. The exception are
virtual machines whose host takes free memory back: to have a large page given again takes milliseconds.
"""

import os
from pathlib import Path

VARIABLE = "SUBQUAD_LARGE_PAGES"  # 1 or 0, whatever the machine is
DEVICES = Path("/sys/bus/virtio/devices")
BALLOON, REPORTING = "0x0005", 5  # virtio's number of the device, and its feature that reports free pages to the host


def why_not() -> str:
    """Empty if they are to be used."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0", "1"):
        return f"{VARIABLE} must be 0 or 1, not {chosen!r}"
    if chosen == "0":
        return f"switched off by {VARIABLE}"
    if not chosen and host_takes_memory_back():
        return "the host of this virtual machine takes free memory back"
    return ""


def host_takes_memory_back(devices: Path = DEVICES) -> bool:
    """As far as Linux tells: features of a device are a line of zeros and ones."""
    try:
        return any(
            (device / "device").read_text().strip() == BALLOON
            and (device / "features").read_text()[REPORTING : REPORTING + 1] == "1"
            for device in devices.iterdir()
        )
    except OSError:
        return False
