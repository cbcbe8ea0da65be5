"""Whether the C++ engine asks the system for large pages of memory (2 MB instead of 4 kB) for its results.

Results are fresh memory at every call, and pages of 4 kB cost up to a third of the time of `linear`. The exception is a
virtual machine whose host takes free memory back: to have a large page given again takes milliseconds.
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
    """As far as Linux tells: features of a device are a line of zeros and ones. False if it does not."""
    return devices.is_dir() and any(map(_reports_free_pages, sorted(devices.iterdir())))


def _reports_free_pages(device: Path) -> bool:
    try:
        number, features = ((device / name).read_text() for name in ("device", "features"))
    except OSError:
        return False
    return number.strip() == BALLOON and features[REPORTING : REPORTING + 1] == "1"
