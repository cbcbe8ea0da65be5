"""Named feature maps that act on each number alone, with the derivative the engines need."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ElementwiseMap(NamedTuple):
    """`phi(x) >= 0`, and `slope(x, phi(x))` = dphi/dx."""

    phi: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that it does not cancel: in float32 `F.elu(-20.) + 1` is exactly 0, exp(-20) is not."""
    return torch.where(x < 0, x.clamp(max=0).exp(), x + 1)


ELEMENTWISE = {
    "elu1": ElementwiseMap(elu1, lambda _, phi: phi.clamp(max=1)),
    "relu": ElementwiseMap(F.relu, lambda x, _: (x > 0).to(x.dtype)),
    "softplus": ElementwiseMap(F.softplus, lambda x, _: x.sigmoid()),
    "relu2": ElementwiseMap(lambda x: F.relu(x).square(), lambda x, _: 2 * F.relu(x)),
    "identity": ElementwiseMap(lambda x: x, lambda x, _: torch.ones_like(x)),  # features given by the caller
}
