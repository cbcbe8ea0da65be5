"""The position of a token: rotation of queries and keys, or a vector added to the embedding."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines, `[B or 1, 1, T, D / 2]`."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x `[B, H, T, D]` with the halves of each head rotated, in the dtype of x."""
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)
        return turned.to(x.dtype)


def rotation(positions: Tensor, head_dim: int, base: float = 10_000.0, share: float = 1.0) -> Rotation:
    """Rotary embedding (Su et al. 2021) for positions `[B or 1, T]`; computed once, used by every layer.

    share: of the pairs of numbers that turn, those with the highest frequencies. The others say what a token is
    wherever it stands, and there are no angles of low frequencies that only longer sequences than those of the training
    bring (Barbero et al. 2024).
    """
    angles = _angles(positions, head_dim, base)
    angles[..., int(share * angles.shape[-1] + 0.5) :] = 0
    angles = angles[:, None]
    return Rotation(angles.cos().float(), angles.sin().float())


def sinusoidal(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """`[B or 1, T, dim]`: sines, then cosines (Vaswani et al. 2017)."""
    angles = _angles(positions, dim, base)
    return torch.cat([angles.sin(), angles.cos()], -1).float()


def _angles(positions: Tensor, dim: int, base: float) -> Tensor:
    # in float32 an angle at position one million is off by 0.06
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = base ** -(torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim)
    return positions[..., None].to(dtype) * frequencies
