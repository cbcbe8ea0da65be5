"""Measuring time and memory honestly: both sides in one run, several repeats, peaks from the operating system."""

from subquad.bench.measure import Timing, peak_memory, time_side_by_side

__all__ = ["Timing", "peak_memory", "time_side_by_side"]
