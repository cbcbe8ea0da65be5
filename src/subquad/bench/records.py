"""What a record of measurements says about where it comes from."""

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from subquad.kernels.cpu import library


def machine() -> dict[str, Any]:
    """Processor, engine, versions, commit and date."""
    facts = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "threads": torch.get_num_threads(),
        "native_engine": library.LOADED if isinstance(library.LOADED, str) else library.LOADED.machine,
        "torch": str(torch.__version__),
        "commit": commit(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }


def commit() -> str:
    """Of the source the package runs from, if it runs from one."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"
