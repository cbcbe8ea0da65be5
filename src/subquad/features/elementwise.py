"""Named feature maps that act on each number alone, with the derivative the engines need.

Features, and sums of weights, below `smallest` count as zero: 1 / x and what it is multiplied by must be finite,
also in gradients, which float32 cannot hold for numbers near its own smallest.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def smallest(dtype: torch.dtype) -> float:
    """The least size that counts, as TINY in the C++ engine: 2^-100, some 8e-31; 2^-900 in float64; in float16, whose
    smallest number is larger, that one."""
    return {torch.float64: 2.0**-900, torch.float16: 2.0**-24}.get(dtype, 2.0**-100)


def without_tiny(phi: Tensor) -> Tensor:
    """Zeros for what is too small to count. NaN stays NaN."""
    return phi.masked_fill(phi.abs() < smallest(phi.dtype), 0)


def at_least_tiny(total: Tensor) -> Tensor:
    """Where a sum of weights can be divided by. NaN can: it must be seen."""
    return ~(total.abs() < smallest(total.dtype))


def by_largest(phi: Tensor) -> Tensor:
    """Features of queries, the largest of each row 1: a row's own factor cancels."""
    size = phi.abs().amax(-1, keepdim=True).detach()
    return phi / torch.where(size > 0, size, 1)


class ElementwiseMap(NamedTuple):
    """`phi(x) >= 0`, and `slope(x, phi(x))` = dphi/dx."""

    phi: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that it does not cancel: in float32 `F.elu(-20.) + 1` is exactly 0, exp(-20) is not."""
    return torch.where(x < 0, x.clamp(max=0).exp(), x + 1)


ELEMENTWISE = {
    "elu1": ElementwiseMap(lambda x: without_tiny(elu1(x)), lambda _, phi: phi.clamp(max=1)),
    "relu": ElementwiseMap(lambda x: without_tiny(F.relu(x)), lambda _, phi: (phi > 0).to(phi.dtype)),
    # 1 - exp(-phi) is the sigmoid of x, and 0 where phi is
    "softplus": ElementwiseMap(lambda x: without_tiny(F.softplus(x)), lambda _, phi: -torch.expm1(-phi)),
    "relu2": ElementwiseMap(lambda x: without_tiny(F.relu(x).square()), lambda x, phi: 2 * F.relu(x) * (phi > 0)),
    "identity": ElementwiseMap(without_tiny, lambda x, _: torch.ones_like(x)),  # features given by the caller
}
