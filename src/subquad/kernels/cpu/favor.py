"""FAVOR attention by the C++ engine: the interface of `kernels.favor`."""

from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels.cpu import problem
from subquad.kernels.cpu.gate import Plan
from subquad.kernels.cpu.library import Problem
from subquad.kernels.cpu.problem import KINDS, RULES, dense_rows, float32, make_plan, mask, parts_per_head
from subquad.kernels.cpu.run import run_backward, run_forward
from subquad.kernels.favor.problem import EngineOptions, FavorInputs, Gradients
from subquad.kernels.logs import MapGradients
from subquad.kernels.problem import Saved


def border_count(length: int, heads: int, num_features: int, options: EngineOptions) -> int:
    """How many states the forward keeps for the backward, however many heads there are."""
    if not options.borders:
        return 0
    if not options.causal and not options.near:
        return 1
    block = options.near or problem.block_size(0, options.chunk, length)  # not cut to the length, which may be a symbol
    return problem.border_count(length, block, num_features) * (1 if options.causal else 2)


def map_numbers(map: FeatureMap) -> dict[str, int]:
    return {
        "kind": KINDS.index("exp"),
        "rule": RULES.index(map.rule),
        "rule_groups": map.groups,
        "map_heads": map.query.shape[0],
        "num_features": map.num_features,
    }


def map_tensors(map: FeatureMap) -> dict[str, Tensor | None]:
    names = ("query", "key", "key_bias", "offset_weight", "offset_bias")
    return {name: float32(getattr(map, name)) for name in names}


def _problem(inputs: FavorInputs, options: EngineOptions) -> tuple[Plan, Problem]:
    q, k, v, sink_k, sink_v, feature_map, *masks, far_max, far_sum = inputs
    batch = max((m.shape[0] for m in masks if m is not None), default=1)
    alive, fold, sink_seen = (mask(m, batch) for m in masks)
    block = problem.block_size(options.near, options.chunk, q.shape[2])
    divisible = (
        feature_map.groups if feature_map.rule == "groups" else feature_map.num_features // problem.SMALLEST_SLICE
    )
    plan = make_plan(
        *(q, k, v),
        **map_numbers(feature_map),
        **{"sinks": sink_k.shape[2], "mask_batch": batch},
        **{"causal": int(options.causal), "gaussian": int(options.gaussian), "near_blocks": int(options.near > 0)},
        block=block,
        blocks_per_segment=problem.blocks_per_segment(block, feature_map.num_features),
        tile=min(options.chunk or problem.TILE, problem.TILE),
        slices=max(1, min(parts_per_head(q.shape[0] * k.shape[1]), divisible)),
    )
    rows = {"q": q, "k": k, "v": v, "sink_k": sink_k, "sink_v": sink_v}
    given = plan.problem(
        options.scale**0.5,
        **{name: dense_rows(tensor) for name, tensor in rows.items()},
        **map_tensors(feature_map),
        **{"alive": alive, "fold": fold, "sink_seen": sink_seen},
        **{"far_max": float32(far_max), "far_sum": float32(far_sum)},
    )
    return plan, given


def forward(inputs: FavorInputs, options: EngineOptions) -> tuple[Tensor, ...]:
    """As `kernels.favor.forward`."""
    plan, given = _problem(inputs, options)
    borders = border_count(inputs.q.shape[2], 0, inputs.map.num_features, options)
    return run_forward(plan, given, inputs.q, inputs.map.num_features, (2,), borders)


def backward(
    inputs: FavorInputs,
    options: EngineOptions,
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    want_map_gradients: bool,
) -> tuple[Gradients, Tensor, MapGradients | None]:
    """As `kernels.favor.backward`."""
    plan, given = _problem(inputs, options)
    slices, heads = given.slices, (inputs.q.shape[0], inputs.k.shape[1])
    new = borders_sum.new_empty
    sinks = [new(slices, *t.shape) for t in (inputs.sink_k, inputs.sink_v)]
    of_map = None
    if want_map_gradients:
        m = inputs.map
        of_map = MapGradients(
            *(new(*heads, *t.shape[1:]) for t in (m.query, m.key, m.key_bias)),
            *(new(0) if t is None else new(slices, *heads, *t.shape[1:]) for t in (m.offset_weight, m.offset_bias)),
        )
    q, k, v, grad_state = run_backward(
        *(plan, given, inputs[:3], saved, borders_max, borders_sum, grad_far_sum), sinks=sinks, map=of_map
    )
    gradients = Gradients(q, k, v, *(s.sum(0) for s in sinks))
    return gradients, grad_state, None if of_map is None else _sum_over_sequences(of_map, inputs.map)


def _sum_over_sequences(gradients: MapGradients, map: FeatureMap) -> MapGradients:
    """From one gradient per slice, sequence and key head to the map's own shapes."""
    tensors = (map.query, map.key, map.key_bias, map.offset_weight, map.offset_bias)
    summed = []
    for grad, tensor in zip(gradients, tensors, strict=True):
        if tensor is None:
            summed.append(grad)
            continue
        per_head = grad.flatten(0, grad.dim() - tensor.dim() - 1).sum(0)
        summed.append(per_head if tensor.shape[0] > 1 else per_head.sum(0, keepdim=True))
    return MapGradients(*summed)
