"""Clocks and memory."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Timing(NamedTuple):
    """Seconds; all samples are kept."""

    samples: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def time_side_by_side(calls: Mapping[str, Callable[[], object]], repeats: int = 3) -> dict[str, Timing]:
    """Each call once to warm up, then all of them in turn, so that a slow spell of the machine hits everyone."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def peak_memory(call: Callable[[], object]) -> int | None:
    """Bytes that the process held at most during `call`, above what it held before; None where Linux's /proc is not."""
    try:
        give_back_free_memory()
        CLEAR.write_text("5")  # resets the peak
        before = _status("VmRSS")
    except OSError:
        call()
        return None
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def give_back_free_memory() -> None:
    """What was freed but is kept by the allocator goes back to the system, where the C library can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
