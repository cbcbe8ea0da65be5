"""Decoding with FAVOR attention: a state of constant size, extended by any number of tokens at a time.

The far field holds whole blocks only. A state therefore keeps, beside it, the `reach` previous blocks and the
unfinished one as they are, and folds a block away when a new one begins. Sequences of one batch may stand at different
positions.
"""

import functools
from typing import NamedTuple, cast

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.errors import SubquadError
from subquad.features import FeatureMap
from subquad.features.buffers import LayerFeatures
from subquad.kernels import compensated, engines
from subquad.kernels.blocks import with_ones
from subquad.kernels.compensated import Total, scaled_low
from subquad.kernels.cpu.plain_step import takes_plain_step
from subquad.kernels.favor import native
from subquad.kernels.favor.inputs import FavorOptions
from subquad.kernels.favor.logs import LogFeatures, half_square
from subquad.kernels.favor.operator import favor_attention
from subquad.kernels.favor.problem import References, normalise, references
from subquad.kernels.problem import DEAD, FLOOR
from subquad.mechanism import State, repeat_heads
from subquad.mechanisms.packing import pack, put, slots_of, unpack

PAST = ("sink_k", "sink_v", "far_max", "far_sum")  # tensors of a state that the engines take as they are


class FavorState(NamedTuple):
    """Constant in size. C = near, M features (0 without a far field).

    length `[B]`: real tokens so far. sink_k, sink_v `[B, K, sinks, ..]`. block_k, block_v `[B, K, (reach + 1) C, ..]`:
    the `reach` previous blocks and the unfinished one. far_max `[B, K, M]`, far_sum `[B, K, M, Dv + 1]`: all tokens
    before those. far_low, like far_sum: what rounding left out of it, so that a million steps lose nothing.
    """

    length: Tensor
    sink_k: Tensor
    sink_v: Tensor
    block_k: Tensor
    block_v: Tensor
    far_max: Tensor
    far_sum: Tensor
    far_low: Tensor

    def with_far(self, far_max: Tensor, far_sum: Tensor) -> "FavorState":
        """After several tokens at once."""
        return self._replace(far_max=far_max, far_sum=far_sum, far_low=scaled_low(self.far_low, self.far_max, far_max))


def map_heads(map: FeatureMap, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the map wants them: repeated where it has a map for every query head."""
    if map.query.shape[0] in (1, k.shape[1]):
        return k, v
    return repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])


def kept_tokens(options: FavorOptions) -> int:
    """Of the near blocks: as many as a query sees, and the rest of its own block."""
    return (options.reach + 1) * options.near


def fields(options: FavorOptions, k: Tensor, v: Tensor, maxima: int, features: int) -> states.Fields:
    """What a state's tensors must be."""
    batch, heads, _, dim = k.shape
    sizes = (batch, heads, dim, v.shape[-1], options.sinks, kept_tokens(options), maxima, features)
    return _fields(*sizes) if torch.compiler.is_compiling() else _kept_fields(*sizes)  # a traced call has no memory


def _fields(*sizes: int) -> states.Fields:
    batch, heads, dim, value_dim, sinks, blocks, maxima, features = sizes
    return {
        "length": states.counted(batch),
        "sink_k": states.kept(batch, heads, sinks, dim),
        "sink_v": states.kept(batch, heads, sinks, value_dim),
        "block_k": states.kept(batch, heads, blocks, dim),
        "block_v": states.kept(batch, heads, blocks, value_dim),
        "far_max": states.summed(batch, heads, maxima, empty=FLOOR, least=FLOOR),
        "far_sum": states.summed(batch, heads, features, value_dim + 1),
        "far_low": states.summed(batch, heads, features, value_dim + 1),
    }


_kept_fields = functools.lru_cache(maxsize=64)(_fields)


def extend(
    options: FavorOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    state: FavorState,
    key_mask: Tensor | None,
) -> tuple[Tensor, FavorState]:
    if q.shape[2] == 1:
        checks.no_transforms(q, k, v)
        tensors = (k, v, *state, map.query, map.key, map.key_bias, map.offset_weight, map.offset_bias)
        needs = {"reach": options.reach > 1, "without_far": not options.far}
        if step := engines.step_of("favor", options.backend, q, *tensors, **needs):
            out, new = step(q, k, v, map, None if key_mask is None else key_mask[:, 0], state, options)
            return out, FavorState(*new)
    real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    if q.shape[2] == 1:
        return _Step(options, map, state, real[:, 0]).extend(q, k, v)
    index = state.length[:, None] + real.cumsum(-1) - 1  # position among the real tokens of the sequence
    slots = slots_of(index, real & (index < options.sinks), options.sinks)
    state = state._replace(sink_k=put(state.sink_k, k, slots), sink_v=put(state.sink_v, v, slots))
    if options.near:
        return _extend_blocks(options, q, k, v, map, state, real)
    seen = (index + 1).clamp(max=options.sinks) if options.sinks else None
    alive = real & (index >= options.sinks)
    masks = {"alive": alive, "sink_seen": seen}
    out, far_max, far_sum = favor_attention(q, k, v, map, options, causal=True, **masks, **_past(options, state))
    return out, _with_far(options, state, far_max, far_sum)._replace(length=state.length + real.sum(-1))


def _past(options: FavorOptions, state: FavorState) -> dict[str, Tensor]:
    return {name: getattr(state, name) for name in (PAST if options.far else PAST[:2])}


def _with_far(options: FavorOptions, state: FavorState, far_max: Tensor, far_sum: Tensor) -> FavorState:
    return state.with_far(far_max, far_sum) if options.far else state


def plain_step(
    options: FavorOptions, q: Tensor, k: Tensor, v: Tensor, features: LayerFeatures, state: State | None
) -> tuple[Tensor, FavorState] | None:
    """One token more, if the C++ engine takes it and the state as they are; else None, and nothing happened."""
    if not takes_plain_step(options.backend, q, k, v, state, FavorState):
        return None
    try:
        feature_map = features.feature_map_of_step(q.dtype)
        out, new = native.plain_step(q, k, v, feature_map, None, cast(FavorState, state), options)
    except SubquadError:
        return None
    return out, FavorState(*new)


def _extend_blocks(
    options: FavorOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    state: FavorState,
    real: Tensor,
) -> tuple[Tensor, FavorState]:
    """Lines the kept blocks and the new tokens up, so that blocks begin at multiples of `near` again.

    With W = reach C:

    slot     0 .. W-1          W .. W+C-1                       W+C ..
    holds    previous blocks   unfinished block, new tokens     new tokens
    """
    block, reach, length = options.near, options.reach, kept_tokens(options) + q.shape[2]
    offset = reach * block + state.length % block  # slot of the first new token
    slots = slots_of(offset[:, None] + real.cumsum(-1) - 1, real, length)
    line_k, line_v = (
        put(torch.cat([kept, kept.new_zeros(*new.shape[:2], new.shape[2], new.shape[3])], 2), new, slots)
        for kept, new in ((state.block_k, k), (state.block_v, v))
    )
    end = offset + real.sum(-1)
    slot = torch.arange(length, device=q.device)
    index = (state.length - offset)[:, None] + slot  # position of a slot's token among the real ones
    alive = (index >= options.sinks) & (index >= 0) & (slot < end[:, None])
    current = end // block  # the block that stays unfinished
    fold = alive & (slot // block < current[:, None] - reach)
    seen = (index + 1).clamp(0, options.sinks) if options.sinks else None
    masks = {"alive": alive, "fold": fold, "sink_seen": seen}
    line = pack(q, slots, length), line_k, line_v
    out, far_max, far_sum = favor_attention(*line, map, options, causal=True, **masks, **_past(options, state))
    kept = ((current - reach) * block)[:, None] + torch.arange(kept_tokens(options), device=q.device)
    kept = slots_of(kept, kept < end[:, None], length)
    state = _with_far(options, state, far_max, far_sum)._replace(
        length=state.length + real.sum(-1), block_k=unpack(line_k, kept), block_v=unpack(line_v, kept)
    )
    return unpack(out, slots), state


class _Far(NamedTuple):
    """The far field of a state."""

    max: Tensor
    sum: Tensor
    low: Tensor


class _Step:
    """One new token per sequence, in a handful of small operations. real `[B]`: whether it counts."""

    def __init__(self, options: FavorOptions, map: FeatureMap, state: FavorState, real: Tensor) -> None:
        self.options, self.state, self.real = options, state, real
        self.dtype = state.far_sum.dtype
        self.features = LogFeatures(map, self.dtype, options.gaussian)
        self.before = options.reach * options.near  # tokens of whole blocks that are kept
        self.root = options.scale**0.5

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, FavorState]:
        state, near, sinks = self.state, self.options.near, self.options.sinks
        count = state.length + self.real
        sink_k, sink_v = self._write(state.sink_k, state.sink_v, k, v, state.length)
        block_k, block_v, far = state.block_k, state.block_v, _Far(state.far_max, state.far_sum, state.far_low)
        if near:
            block_k, block_v = self._write(block_k, block_v, k, v, self.before + state.length % near)
        elif self.options.far:
            far = self._fold(k, v, self.real & (state.length >= sinks), far)
        out = self._read(q, (sink_k, block_k), (sink_v, block_v), far)
        if near:
            out = out.masked_fill(~self.real[:, None, None, None], 0)
            block_k, block_v, far = self._begin_block(count, block_k, block_v, far)
        return out, FavorState(count, sink_k, sink_v, block_k, block_v, *far)

    def _write(self, kept_k: Tensor, kept_v: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        here = torch.arange(kept_k.shape[2], device=k.device) == slot[:, None]
        here = (here & self.real[:, None])[:, None, :, None]
        return torch.where(here, k, kept_k), torch.where(here, v, kept_v)

    def _fold(self, k: Tensor, v: Tensor, alive: Tensor, far: _Far) -> _Far:
        """The far field with more keys in it. k `[B, K, N, D]`, alive `[B]` or `[B, N]`."""
        alive = alive.view(k.shape[0], 1, -1)
        y, values = k.to(self.dtype) * self.root, with_ones(v.to(self.dtype))
        y, values = (t.masked_fill(~alive[..., None], 0) for t in (y, values))
        logs = self.features.of_keys(y, torch.where(alive, 0.0, DEAD).to(self.dtype))
        grown = torch.maximum(far.max, logs.amax(-2)).detach()
        weights = (logs - grown[:, :, None]).exp()
        total = compensated.add(Total(far.sum, far.low), weights.mT @ values, (far.max - grown).exp()[..., None])
        return _Far(grown, *total)

    def _begin_block(self, count: Tensor, block_k: Tensor, block_v: Tensor, far: _Far) -> tuple[Tensor, Tensor, _Far]:
        """Where the block is full, folds the first one that is kept away, and the others move up."""
        near = self.options.near
        full = self.real & (count % near == 0)
        if not torch.compiler.is_compiling() and not bool(full.any()):
            return block_k, block_v, far
        if self.options.far:
            index = (count - kept_tokens(self.options))[:, None] + torch.arange(near, device=count.device)
            alive = full[:, None] & (index >= self.options.sinks) & (index >= 0)
            far = self._fold(block_k[:, :, :near], block_v[:, :, :near], alive, far)
        moved = (torch.cat([b[:, :, near:], torch.zeros_like(b[:, :, :near])], 2) for b in (block_k, block_v))
        select = full[:, None, None, None]
        block_k, block_v = (torch.where(select, m, b) for m, b in zip(moved, (block_k, block_v), strict=True))
        return block_k, block_v, far

    def _read(self, q: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], far: _Far) -> Tensor:
        key_heads = far.max.shape[1]
        x = q.to(self.dtype).reshape(q.shape[0], key_heads, -1, q.shape[-1]) * self.root  # a group's heads as rows
        y = torch.cat(keys, 2).to(self.dtype) * self.root
        logits = x @ y.mT
        if self.options.gaussian:
            logits = logits - half_square(y)[:, :, None]
        logits = logits.masked_fill(~self._exact_mask()[:, None, None], -torch.inf)
        of_exact = with_ones(torch.cat(values, 2).to(self.dtype))
        if not self.options.far:
            top = logits.detach().amax(-1).clamp(min=FLOOR)
            out, _ = normalise((logits - top[..., None]).exp() @ of_exact, References(top, top))
            return out.reshape(q.shape[0], q.shape[1], 1, -1).to(q.dtype)
        logs, scalar = self.features.of_queries(x)
        logs = logs + far.max[:, :, None]
        no_exact = logits.shape[-1] == 0
        reference = references(logs.detach(), None if no_exact else logits.detach(), scalar.detach())
        unit = (scalar - scalar.detach())[..., None]  # 0, with the gradient that the scalar has in the far part
        numerator = (logs - reference.far[..., None] + unit).exp() @ far.sum
        exact_weights = (logits - reference.exact[..., None]).exp()
        out, _ = normalise(numerator + exact_weights @ of_exact, reference)
        return out.reshape(q.shape[0], q.shape[1], 1, -1).to(q.dtype)

    def _exact_mask(self) -> Tensor:
        """`[B, sinks + (reach + 1) near]`: which kept keys the new token sees; it is among them itself."""
        near, sinks, count = self.options.near, self.options.sinks, self.state.length[:, None]
        seen = self.state.length[:, None] + self.real[:, None]
        sink = torch.arange(sinks, device=count.device) < seen
        if not near:
            return sink
        slots = torch.arange(kept_tokens(self.options), device=count.device)
        index = count - count % near - self.before + slots
        return torch.cat([sink, (index >= sinks) & (index >= 0) & (index < seen)], 1)
