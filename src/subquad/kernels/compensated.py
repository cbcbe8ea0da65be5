"""Sums of millions of terms, one at a time: a float32 total, and beside it what rounding left out of it.

Without it a total stops growing where a term is less than half of its last digit: after a million tokens of decoding
some terms in 100,000 would be lost.
"""

from typing import NamedTuple

from torch import Tensor


class Total(NamedTuple):
    """`high + low`; high is that sum rounded, so reading needs nothing else."""

    high: Tensor
    low: Tensor


def add(total: Total, more: Tensor, decay: Tensor | None = None) -> Total:
    """`decay * total + more`. The low part is a correction of rounding, and has no gradient of its own."""
    high = total.high if decay is None else total.high * decay
    low = total.low if decay is None else total.low * decay.detach()
    rounded = high + more
    part = (rounded - high).detach()
    low = low + ((high.detach() - (rounded.detach() - part)) + (more.detach() - part))
    result = rounded + low
    return Total(result, low - (result - rounded).detach())


def scaled_low(low: Tensor, old_max: Tensor, new_max: Tensor) -> Tensor:
    """The low part when a far field has moved from one maximum to another. Maxima `[.., M or 1]`, low `[.., M, V]`."""
    return low * (old_max - new_max).exp()[..., None]
