"""FAVOR attention by the C++ engine: the interface of `favor/torch.py`, and one token of decoding.

The mathematics is in `kernels/cpu/src`: `forward.hpp`, `backward.hpp` and `step.hpp`, features in `features.hpp`, near
blocks and sinks in `exact.hpp`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.checks.states import MOST_TOKENS
from subquad.features import FeatureMap
from subquad.kernels.cpu import call, gate
from subquad.kernels.cpu.call import KINDS, RULES, dense_rows, float32, make_plan, mask, parts_per_head
from subquad.kernels.cpu.gate import Plan, StepPlan
from subquad.kernels.cpu.library import KEPT, Problem
from subquad.kernels.favor.inputs import MAP_TENSORS, FavorInputs, FavorOptions
from subquad.kernels.problem import Gradients, Outputs, Saved


def border_count(length: int, heads: int, num_features: int, options: FavorOptions) -> int:
    """How many states the forward keeps for the backward, however many heads there are."""
    if not (options.borders and options.far):
        return 0
    if not options.causal and not options.near:
        return 1
    block = _block(options, MOST_TOKENS)  # not cut to the length, which may be a symbol
    return call.border_count(length, block, num_features) * (1 if options.causal else 2)


def _block(options: FavorOptions, length: int) -> int:
    """Tokens per block. Near blocks that reach no further than their neighbours, and have a far field, are
    blocks themselves."""
    if options.near and (options.reach > 1 or not options.far):
        return call.blocks_of_tile(options.near, options.chunk, length)
    return call.block_size(options.near, options.chunk, length)


def forward(inputs: FavorInputs, options: FavorOptions) -> Outputs:
    plan, given = _problem(inputs, options)
    borders = border_count(inputs.q.shape[2], 0, inputs.num_features, options)
    return call.run_forward(plan, given, inputs.q, borders)


def backward(inputs: FavorInputs, options: FavorOptions, saved: Saved, want_map: bool) -> Gradients:
    """Of all inputs that have one; of the feature map if asked, of `far_sum` if it was given."""
    plan, given = _problem(inputs, options)
    added = {}
    for name in ("sink_k", "sink_v"):
        added[name] = saved.borders_sum.new_empty(given.slices, *getattr(inputs, name).shape)
    if want_map:
        added |= _new_map_gradients(inputs, given)
    gradients = call.run_backward(plan, given, inputs, saved, added)
    for name in ("sink_k", "sink_v"):
        gradients[name] = gradients[name].sum(0)
    for name in MAP_TENSORS if want_map else ():
        if (tensor := getattr(inputs, name)) is not None:
            gradients[name] = _summed_like(tensor, gradients[name])
    return gradients


def _problem(inputs: FavorInputs, options: FavorOptions) -> tuple[Plan, Problem]:
    q, k, num_features = inputs.q, inputs.k, inputs.num_features
    masks = inputs.alive, inputs.fold, inputs.sink_seen
    batch = max((m.shape[0] for m in masks if m is not None), default=1)
    alive, fold, sink_seen = (mask(m, batch) for m in masks)
    block, near = _block(options, q.shape[2]), min(options.near, q.shape[2]) or 1
    divisible = options.groups if options.rule == "groups" else num_features // call.SMALLEST_SLICE
    plan = make_plan(
        q,
        k,
        inputs.v,
        kind=KINDS.index("exp"),
        rule=RULES.index(options.rule),
        rule_groups=options.groups,
        map_heads=inputs.query.shape[0],
        num_features=num_features,
        sinks=options.sinks,
        mask_batch=batch,
        causal=int(options.causal),
        gaussian=int(options.gaussian),
        near_blocks=int(options.near > 0),
        block=block,
        blocks_per_segment=call.blocks_per_segment(block, num_features),
        tile=min(options.chunk or call.TILE, call.TILE),
        near=near,
        reach=min(options.reach, -(-q.shape[2] // near)),  # no block is farther away
        far=int(options.far),
        slices=max(1, min(parts_per_head(q.shape[0] * k.shape[1]), divisible)),
    )
    rows = {name: dense_rows(getattr(inputs, name)) for name in ("q", "k", "v", "sink_k", "sink_v")}
    floats = {name: float32(getattr(inputs, name)) for name in (*MAP_TENSORS, "far_max", "far_sum")}
    return plan, plan.problem(options.scale**0.5, **rows, **floats, alive=alive, fold=fold, sink_seen=sink_seen)


def _new_map_gradients(inputs: FavorInputs, given: Problem) -> Gradients:
    """One for each sequence and key head, those of the offset for each slice, too."""
    heads, made = (given.batch, given.key_heads), {}
    for name in MAP_TENSORS:
        tensor = getattr(inputs, name)
        slices = (given.slices,) if name.startswith("offset") else ()
        if tensor is not None:
            made[name] = torch.empty(*slices, *heads, *tensor.shape[1:], dtype=torch.float32, device="cpu")
    return made


def _summed_like(tensor: Tensor, grad: Tensor) -> Tensor:
    per_head = grad.flatten(0, grad.dim() - tensor.dim() - 1).sum(0)
    return per_head if tensor.shape[0] > 1 else per_head.sum(0, keepdim=True)


# Decoding -------------------------------------------------------------------------------------------------------------

ONE = torch.tensor(1, device="cpu")  # sooner added than the number
SINKS, BLOCKS, FAR = (
    tuple(place for place, name in enumerate(KEPT) if name.startswith(part)) for part in ("sink", "block", "far")
)


def step(
    q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, real: Tensor | None, state: Any, options: FavorOptions
) -> tuple[Tensor, list[Tensor]]:
    """One token for every sequence: the output, and the tensors of the next state in the order of `FavorState`.

    q, k, v `[B, ., 1, .]`, real `[B]` (None: all); state has the tensors of `FavorState`, which are left alone: what
    changes is written to new ones, and what does not change is shared.
    """
    maps = {name: float32(getattr(map, name)) for name in MAP_TENSORS}
    real = None if real is None else real.contiguous()
    kept = [tensor.contiguous() for tensor in state]
    return plain_step(dense_rows(q), dense_rows(k), dense_rows(v), map._replace(**maps), real, kept, options)


def plain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    real: Tensor | None,
    state: Sequence[Tensor],
    options: FavorOptions,
) -> tuple[Tensor, list[Tensor]]:
    """The same of tensors that lie as C++ reads them: dense, but for the heads of q, k and v; maps in float32."""
    plan = _step_plan(
        q.dtype, q.shape, k.shape, v.shape, map.query.shape, map.rule, map.groups, options, torch.get_num_threads()
    )
    inputs = q, k, v, map.query, map.key, map.key_bias, map.offset_weight, map.offset_bias
    length, *kept = state
    given, read = plan.given(inputs), plan.read(real, length, kept)
    out, new = call.run_step(plan, given, read, kept, _changed(length.tolist(), options))
    new.insert(0, length + (ONE if real is None else real))
    return out if q.dtype is torch.float32 else out.to(q.dtype), new


@functools.lru_cache(maxsize=64)
def _step_plan(
    dtype: torch.dtype,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    query: torch.Size,
    rule: str,
    groups: int,
    options: FavorOptions,
    threads: int,
) -> StepPlan:
    """Looked up with every token, so by what is at hand."""
    return call.step_plan(
        dtype,
        (q, k, v),
        options.scale**0.5,
        threads=threads,
        kind=KINDS.index("exp"),
        rule=RULES.index(rule),
        rule_groups=groups,
        map_heads=query[0],
        num_features=query[1],
        sinks=options.sinks,
        gaussian=int(options.gaussian),
        near_blocks=int(options.near > 0),
        block=options.near or 1,
        near=options.near or 1,
        reach=options.reach,
        far=int(options.far),
    )


def _changed(lengths: Sequence[int], options: FavorOptions) -> tuple[int, ...]:
    """The places in `KEPT` that one more token changes."""
    near, fold, sink = options.near, not options.near, False
    for before in lengths:
        if not 0 <= before < MOST_TOKENS:
            raise checks.wrong_length(gate.OP, "length", before, MOST_TOKENS)
        fold = fold or (before + 1) % near == 0
        sink = sink or before < options.sinks
    return (SINKS if sink else ()) + (BLOCKS if near else ()) + (FAR if fold and options.far else ())
