"""Moving tokens to slots: real tokens side by side, whatever the padding between them, which comes last.

`slots` is int64 `[B or 1, T]`; the slot just past the end means "in no slot".
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def slots_of(index: Tensor, keep: Tensor, length: int) -> Tensor:
    """`index` where `keep`; else `length`, which is no slot."""
    return torch.where(keep, index, length)


def fitted(x: Tensor, length: int) -> Tensor:
    """x `[B, H, N, ...]` cut to `length` places, or with zeros behind."""
    return F.pad(x, [0, 0] * (x.dim() - 3) + [0, length - x.shape[2]])


def put(target: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """A copy of target `[B, H, N, D]` with the tokens of x `[B, H, T, D]` in their slots."""
    nowhere = target.new_zeros(*target.shape[:2], 1, target.shape[3])
    index = slots[:, None, :, None].expand(x.shape)
    return torch.cat([target, nowhere], 2).scatter(2, index, x)[:, :, :-1]


def pack(x: Tensor, slots: Tensor, length: int) -> Tensor:
    """Tokens of x in `length` slots, zeros in the others."""
    return put(x.new_zeros(*x.shape[:2], length, x.shape[3]), x, slots)


def unpack(x: Tensor, slots: Tensor) -> Tensor:
    """Token by token what its slot holds, zeros for tokens in no slot. `[B, H, N, D] -> [B, H, T, D]`."""
    somewhere = (slots < x.shape[2])[:, None, :, None]
    index = slots.clamp(max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3])).masked_fill(~somewhere, 0)
