"""Decayed prefix sums over blocks, and their transpose.

States are `[B, K, M, V]`, stacked over the blocks of a tile as `[B, K, N, M, V]`; decays `[B, K, N, M]` or `[.., 1]`.
`reverse` runs from the last block to the first. Letters as in `blocks.py`.
"""

import torch
from torch import Tensor

from subquad.kernels import compensated
from subquad.kernels.compensated import Total


def _order(blocks: int, reverse: bool) -> range:
    return range(blocks - 1, -1, -1) if reverse else range(blocks)


def scan(updates: Tensor, decay: Tensor, initial: Total, reverse: bool = False) -> tuple[Tensor, Total]:
    """`S <- decay_b S + U_b`: the states each block finds before its own update, and the last one.

    The tile is summed up by itself first, so that the sum over all tiles is rounded once for each, and that is kept.
    """
    before, remaining = torch.empty_like(updates), torch.empty_like(decay)
    state, left = torch.zeros_like(initial.high), torch.ones_like(decay[:, :, 0])
    for b in _order(updates.shape[2], reverse):
        before[:, :, b], remaining[:, :, b] = state, left
        state = torch.addcmul(updates[:, :, b], state, decay[:, :, b, :, None])
        left = left * decay[:, :, b]
    before.addcmul_(initial.high[:, :, None], remaining[..., None])
    return before, compensated.add(initial, state, left[..., None])


def scan_backward(reads: Tensor, decay: Tensor, final: Total, reverse: bool = False) -> tuple[Tensor, Total]:
    """From gradients of `before` and of the last state: those of the updates, and of the initial state."""
    return scan(reads, decay, final, not reverse)


def running_maxima(block_maxima: Tensor, initial: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Maxima before and after each block. block_maxima `[B, K, N, M]`, initial `[B, K, M]`."""
    maxima = block_maxima.flip(2) if reverse else block_maxima
    after = torch.maximum(maxima.cummax(2).values, initial[:, :, None])
    before = torch.cat([initial[:, :, None], after[:, :, :-1]], dim=2)
    return (before.flip(2), after.flip(2)) if reverse else (before, after)
