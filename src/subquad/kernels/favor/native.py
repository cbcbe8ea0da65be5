"""FAVOR attention by the C++ engine: the interface of `favor/torch.py`, and one token of decoding.

The mathematics is in `kernels/cpu/src`: `forward.hpp`, `backward.hpp`, `step.hpp`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.checks.states import MOST_TOKENS
from subquad.features import FeatureMap
from subquad.kernels.cpu import call, gate
from subquad.kernels.cpu.call import KINDS, RULES, dense_rows, float32, make_plan, mask, parts_per_head
from subquad.kernels.cpu.gate import Plan
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
    """Tokens per block. Near blocks that reach no further than their neighbours are blocks themselves."""
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
FAR, SINKS, BLOCKS = (tuple(n for n in KEPT if n.startswith(part)) for part in ("far", "sink", "block"))


def step(
    q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, real: Tensor | None, state: Any, options: FavorOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """One token for every sequence: the output, and the tensors of the next state by name.

    q, k, v `[B, ., 1, .]`, real `[B]` (None: all); state has the tensors of `FavorState`, which are left alone: what
    changes is written to new ones, and what does not change is shared.
    """
    near, sinks = options.near, options.sinks
    numbers = map.num_features, map.query.shape[0], map.rule, map.groups, sinks, options.gaussian, near
    numbers += options.reach, options.far
    plan = call.step_plan(call.told_by(q, k, v), "exp", *numbers)
    length = state.length.contiguous()

    def changes() -> tuple[str, ...]:
        lengths = length.tolist()
        checks.lengths(gate.OP, "length", lengths, MOST_TOKENS)
        return _changed(lengths, near, sinks, options.far)

    kept = {name: getattr(state, name).contiguous() for name in KEPT}
    read = {**kept, "length": length, "real": None if real is None else real.contiguous()}
    maps = {name: float32(getattr(map, name)) for name in MAP_TENSORS}
    out, new = call.run_step(plan, q, k, v, options.scale**0.5, maps, read, changes)
    return out, {"length": length + (ONE if real is None else real), **kept, **new}


def _changed(length: Sequence[int], near: int, sinks: int, far: bool = True) -> tuple[str, ...]:
    """The tensors of a state that one more token changes."""
    fold = far and (not near or any((before + 1) % near == 0 for before in length))
    sink = any(before < sinks for before in length)
    return (FAR if fold else ()) + (SINKS if sink else ()) + (BLOCKS if near else ())
