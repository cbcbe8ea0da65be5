"""Sums of millions of terms, a few at a time: a float32 total, and beside it what rounding left out of it.

Without it a total stops growing where a term is less than half of its last digit: after a million tokens of decoding
some terms in 100,000 would be lost. Gradients of the far field are sums with both signs, which may be smaller than
their terms by far. Letters as in `blocks.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 512  # tokens that one product sums up


class Total(NamedTuple):
    """`high + low`; high is that sum rounded, so reading needs nothing else."""

    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, high: Tensor) -> "Total":
        return cls(high, torch.zeros_like(high))


def add(total: Total, more: Tensor, decay: Tensor | None = None) -> Total:
    """`decay * total + more`. The low part is a correction of rounding, and has no gradient of its own."""
    high = total.high if decay is None else total.high * decay
    low = total.low if decay is None else total.low * decay.detach()
    rounded = high + more
    part = (rounded - high).detach()
    low = low + ((high.detach() - (rounded.detach() - part)) + (more.detach() - part))
    result = rounded + low
    return Total(result, low - (result - rounded).detach())


def product_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """`a.mT @ b`, summed up over pieces of the tokens first. a `[.., T, M]`, b `[.., T, V]`."""
    count = a.shape[-2] // PIECE
    cut = count * PIECE
    pieces = (x[..., :cut, :].unflatten(-2, (count, PIECE)) for x in (a, b))
    return (next(pieces).mT @ next(pieces)).sum(-3) + a[..., cut:, :].mT @ b[..., cut:, :]


def scaled_low(low: Tensor, old_max: Tensor, new_max: Tensor) -> Tensor:
    """The low part when a far field has moved from one maximum to another. Maxima `[.., M or 1]`, low `[.., M, V]`."""
    return low * (old_max - new_max).exp()[..., None]
