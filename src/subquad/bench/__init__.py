"""Measuring: time side by side, peak memory, the cost of decoding."""

from subquad.bench.decoding import DecodeCost, decode_costs
from subquad.measure import Timing, peak_memory, time_side_by_side

__all__ = ["DecodeCost", "Timing", "decode_costs", "peak_memory", "time_side_by_side"]
