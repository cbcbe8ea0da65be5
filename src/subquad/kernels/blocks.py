"""Cutting `[B, H, T, D]` tensors into blocks, and putting blocks back.

Letters of FAVOR and linear attention: B batch, H query heads, K key heads, G = H / K query heads per key head,
T queries, S keys, D head dim, Dv value dim, V = Dv + 1 (values with a column of ones, whose sums are normalisers),
M features; N blocks of C tokens, R = G * C rows of queries per block, E keys that a block attends to exactly.
"""

import torch.nn.functional as F
from torch import Tensor


def window(x: Tensor, start: int, stop: int, fill: float = 0.0) -> Tensor:
    """`x[:, :, start:stop]`, `fill` where that reaches beyond either end."""
    low, high = max(start, 0), min(stop, x.shape[2])
    if high <= low:
        return x.new_full((*x.shape[:2], stop - start, *x.shape[3:]), fill)
    piece = x[:, :, low:high]
    if (low, high) == (start, stop):
        return piece
    return F.pad(piece, (0, 0) * (x.dim() - 3) + (low - start, stop - high), value=fill)


def add_window(target: Tensor, start: int, piece: Tensor) -> None:
    """Adds `piece` to `target[:, :, start:...]`, dropping what reaches beyond either end."""
    low, high = max(start, 0), min(start + piece.shape[2], target.shape[2])
    if low < high:
        target[:, :, low:high] += piece[:, :, low - start : high - start]


def to_blocks(x: Tensor, block: int, groups: int = 1) -> Tensor:
    """`[B, K*G, N*C, ...] -> [B, K, N, G*C, ...]`: the query heads of one key head share a block's rows."""
    batch, heads, length, *rest = x.shape
    x = x.reshape(batch, heads // groups, groups, length // block, block, *rest)
    return x.transpose(2, 3).reshape(batch, heads // groups, length // block, groups * block, *rest)


def from_blocks(x: Tensor, block: int, groups: int = 1) -> Tensor:
    """Inverse of `to_blocks`."""
    batch, heads, blocks, _, *rest = x.shape
    x = x.reshape(batch, heads, blocks, groups, block, *rest).transpose(2, 3)
    return x.reshape(batch, heads * groups, blocks * block, *rest)


def with_ones(v: Tensor) -> Tensor:
    """Values with a last column of ones, so that one product yields numerator and normaliser."""
    return F.pad(v, (0, 1), value=1.0)
