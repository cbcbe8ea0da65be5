"""Decayed prefix sums over blocks, and their transpose.

States are `[B, K, M, V]`, stacked over the blocks of a tile as `[B, K, N, M, V]`; decays `[B, K, N, M]` or `[.., 1]`.
`reverse` runs from the last block to the first.
"""

import torch
from torch import Tensor


def _order(blocks: int, reverse: bool) -> range:
    return range(blocks - 1, -1, -1) if reverse else range(blocks)


def scan(updates: Tensor, decay: Tensor, initial: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """`S <- decay_b S + U_b`: the states each block finds before its own update, and the last one."""
    before = torch.empty_like(updates)
    state = initial
    for b in _order(updates.shape[2], reverse):
        before[:, :, b] = state
        state = torch.addcmul(updates[:, :, b], state, decay[:, :, b, :, None])
    return before, state


def scan_backward(reads: Tensor, decay: Tensor, final: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """From gradients of `before` and of the last state: those of the updates, and of the initial state."""
    updates = torch.empty_like(reads)
    state = final
    for b in _order(reads.shape[2], not reverse):
        updates[:, :, b] = state
        state = torch.addcmul(reads[:, :, b], state, decay[:, :, b, :, None])
    return updates, state


def running_maxima(block_maxima: Tensor, initial: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Maxima before and after each block. block_maxima `[B, K, N, M]`, initial `[B, K, M]`."""
    maxima = block_maxima.flip(2) if reverse else block_maxima
    after = torch.maximum(maxima.cummax(2).values, initial[:, :, None])
    before = torch.cat([initial[:, :, None], after[:, :, :-1]], dim=2)
    return (before.flip(2), after.flip(2)) if reverse else (before, after)
