"""Decoding with strided attention. Sequences of one batch may be at different positions.

New tokens are lined up so that blocks begin at multiples of the stride again; then they attend as in a forward pass,
but to kept keys too. A single token gathers the keys it sees.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import states
from subquad.kernels.sparse.lines import padded
from subquad.kernels.sparse.torch import ABSENT_KEY
from subquad.mechanism import masked_softmax
from subquad.mechanisms.packing import fitted, pack, put, slots_of, unpack
from subquad.mechanisms.strided_parts import (
    StridedOptions,
    in_blocks,
    merged,
    own_block,
    past_columns,
    summaries,
    to_summaries,
    window,
)


class StridedState(NamedTuple):
    """Grows with the length. length `[B]`: real tokens so far; k, v `[B, K, N, ..]`: all of them, in their places."""

    length: Tensor
    k: Tensor
    v: Tensor


class FixedState(NamedTuple):
    """Grows by the summary of each block. length `[B]`: real tokens so far. C the stride, E places of a summary.

    block_k, block_v `[B, K, C, ..]`: the unfinished block. summary_k, summary_v `[B, K, blocks * E, ..]`: of others.
    """

    length: Tensor
    block_k: Tensor
    block_v: Tensor
    summary_k: Tensor
    summary_v: Tensor


def fields(options: StridedOptions, k: Tensor, v: Tensor) -> states.Fields:
    """What a state's tensors must be."""
    (batch, heads), dim, value_dim = k.shape[:2], k.shape[3], v.shape[3]
    if not options.summary:
        return {
            "length": states.counted(batch),
            "k": states.kept(batch, heads, "N", dim),
            "v": states.kept(batch, heads, "N", value_dim),
        }
    return {
        "length": states.counted(batch),
        "block_k": states.kept(batch, heads, options.stride, dim),
        "block_v": states.kept(batch, heads, options.stride, value_dim),
        "summary_k": states.kept(batch, heads, "N", dim),
        "summary_v": states.kept(batch, heads, "N", value_dim),
    }


def room(options: StridedOptions, state: StridedState | FixedState) -> tuple[int, str]:
    """The most tokens that a state can hold, and where."""
    if isinstance(state, StridedState):
        return state.k.shape[2], "its keys"
    blocks = state.summary_k.shape[2] // options.summary
    return (blocks + 1) * options.stride - 1, "its summaries and its block"


def join(options: StridedOptions, given: Sequence[StridedState | FixedState]) -> StridedState | FixedState:
    """All sequences in one state; what grows begins at their first tokens, so shorter ones have zeros behind."""
    length = torch.cat([state.length for state in given])
    most = int(length.max())
    if options.summary:
        most = most // options.stride * options.summary
    grows = ("summary_k", "summary_v") if options.summary else ("k", "v")
    level = (state._replace(**{name: fitted(getattr(state, name), most) for name in grows}) for state in given)
    return type(given[0])(*(torch.cat(part) for part in zip(*level, strict=True)))


def extend(
    options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, state: StridedState | FixedState, real: Tensor
) -> tuple[Tensor, StridedState | FixedState]:
    """real `[B, T]`: new tokens that are there."""
    if isinstance(state, FixedState):
        return _FixedLine(options, k, v, state, real).extend(q)
    return _extend_strided(options, q, k, v, state, real)


def _extend_strided(
    options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, state: StridedState, real: Tensor
) -> tuple[Tensor, StridedState]:
    stride, total = options.stride, state.k.shape[2] + k.shape[2]
    position = state.length[:, None] + real.cumsum(-1) - 1
    plain = not torch.compiler.is_compiling() and bool((position[:, -1] == total - 1).all())
    slots = slots_of(position, real, total)
    kept = ((state.k, k), (state.v, v))
    new = StridedState(state.length + real.sum(-1), *(_append(*pair, None if plain else slots) for pair in kept))
    if q.shape[2] == 1:
        index = [position - torch.arange(min(stride, total), device=q.device)]
        index.append(position - stride * torch.arange(1, total // stride + 1, device=q.device))
        seen = torch.cat(index, 1)
        slots = slots_of(seen, seen >= 0, total)
        return _one_query(options, q, unpack(new.k, slots), unpack(new.v, slots), (seen >= 0) & real), new
    first = (state.length // stride - 1).clamp(min=0)  # the line begins this many strides after the sequence
    size = -(-(2 * stride - 1 + q.shape[2]) // stride) * stride
    slots = slots_of(position - stride * first[:, None], real, size)
    line = stride * first[:, None] + torch.arange(size, device=q.device)
    line = slots_of(line, line < total, total)
    tokens = in_blocks(pack(q, slots, size), unpack(new.k, line), unpack(new.v, line), None, stride)
    all_k, all_v = (padded(x.to(tokens.k.dtype), stride) for x in (new.k, new.v))
    most = max(state.k.shape[2] // stride - 1, 0)
    out = merged([window(options, tokens, True), past_columns(options, tokens.q, all_k, all_v, first, most)])
    return unpack(out, slots).to(q.dtype), new


def _append(past: Tensor, new: Tensor, slots: Tensor | None) -> Tensor:
    """In `slots` among the kept ones, or behind them."""
    if slots is None:
        return torch.cat([past, new], 2)
    return put(F.pad(past, (0, 0, 0, new.shape[2])), new, slots)


class _FixedLine:
    """The unfinished block and the new tokens, in whole blocks, and the summaries of the blocks before them."""

    def __init__(self, options: StridedOptions, k: Tensor, v: Tensor, state: FixedState, real: Tensor) -> None:
        self.options, self.state, self.real = options, state, real
        stride = options.stride
        self.size = -(-(stride - 1 + k.shape[2]) // stride) * stride
        self.first = (state.length // stride)[:, None]  # blocks before the line
        self.slots = slots_of((state.length % stride)[:, None] + real.cumsum(-1) - 1, real, self.size)
        self.k, self.v = (
            put(F.pad(kept, (0, 0, 0, self.size - stride)), new, self.slots)
            for kept, new in ((state.block_k, k), (state.block_v, v))
        )
        block = torch.arange(state.summary_k.shape[2], device=k.device) // options.summary
        self.past = torch.where(block < self.first, block, ABSENT_KEY)  # [B, past]

    def extend(self, q: Tensor) -> tuple[Tensor, FixedState]:
        return (self._step(q) if q.shape[2] == 1 else self._attend(q)), self._next_state()

    def _step(self, q: Tensor) -> Tensor:
        """One token: the line is one block."""
        state = self.state
        own = torch.arange(self.size, device=q.device) <= (state.length % self.size)[:, None]
        seen = torch.cat([own, self.past != ABSENT_KEY], 1) & self.real
        k, v = (torch.cat(pair, 2) for pair in ((self.k, state.summary_k), (self.v, state.summary_v)))
        return _one_query(self.options, q, k, v, seen)

    def _attend(self, q: Tensor) -> Tensor:
        options, state = self.options, self.state
        tokens = in_blocks(pack(q, self.slots, self.size), self.k, self.v, None, options.stride)
        block = self.first + torch.arange(self.size, device=q.device) // options.stride
        k, v = (
            torch.cat([past.to(line.dtype), summaries(options, line)], 2)
            for past, line in ((state.summary_k, tokens.k), (state.summary_v, tokens.v))
        )
        k_block = torch.cat([self.past, summaries(options, block[:, None, :, None]).flatten(1)], 1)
        far = to_summaries(options, tokens.q, k, v, block, k_block, causal=True)
        return unpack(merged([own_block(options, tokens, True), far]), self.slots).to(q.dtype)

    def _next_state(self) -> FixedState:
        state, stride, summary = self.state, self.options.stride, self.options.summary
        length = state.length + self.real.sum(-1)
        blocks = (length // stride)[:, None]
        finished = blocks - self.first
        if not bool(finished.any()):
            return state._replace(length=length, block_k=self.k[:, :, :stride], block_v=self.v[:, :, :stride])
        kept = finished * stride + torch.arange(stride, device=length.device)
        kept = slots_of(kept, kept < (length - stride * self.first[:, 0])[:, None], self.size)
        # a summary is one of the past ones, or comes after them if its block is in the line
        place = torch.arange(int(blocks.max()) * summary, device=length.device)
        past = state.summary_k.shape[2]
        slots = torch.where(place < self.first * summary, place, past + place - self.first * summary)
        slots = slots_of(slots, place < blocks * summary, past + self.size // stride * summary)
        k, v = (
            unpack(torch.cat([old, summaries(self.options, line)], 2), slots)
            for old, line in ((state.summary_k, self.k), (state.summary_v, self.v))
        )
        return FixedState(length, unpack(self.k, kept), unpack(self.v, kept), k, v)


def _one_query(options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q `[B, H, 1, D]` over the keys of k `[B, K, S, D]` that are seen `[B, S]`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = q.to(dtype).reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # the heads of a group as rows
    weights = masked_softmax(options.scale * x @ k.to(dtype).mT, seen[:, None, None])
    return (weights @ v.to(dtype)).reshape(*q.shape[:3], -1).to(q.dtype)
