"""Decoding by the C++ engine: one token for every sequence of a batch in one call.

The caller's state is left alone: what changes is written to new tensors, and what does not change is shared.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.checks.states import MOST_TOKENS
from subquad.features import FeatureMap
from subquad.kernels.cpu import gate
from subquad.kernels.cpu.favor import map_numbers, map_tensors
from subquad.kernels.cpu.gate import Plan
from subquad.kernels.cpu.library import KEPT, Step
from subquad.kernels.cpu.problem import KINDS, dense_rows, engine, float32, make_plan


def _run(
    plan: Plan,
    qkv: tuple[Tensor, Tensor, Tensor],
    root: float,
    maps: dict[str, Tensor | None],
    before: dict[str, Tensor],
    after: dict[str, Tensor],
    **fields: Tensor | None,
) -> Tensor:
    q, k, v = (dense_rows(t) for t in qkv)
    given = plan.problem(root, True, q=q, k=k, v=v, **maps)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device="cpu")
    new = {f"new_{name}": tensor for name, tensor in after.items()}
    filled = plan.fill(Step(), out=out, **fields, **before, **new)
    engine().step(ctypes.byref(given), ctypes.byref(filled))
    return out.to(q.dtype)


def favor_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    real: Tensor | None,
    state: Any,
    *,
    near: int,
    root: float,
    gaussian: bool,
) -> tuple[Tensor, Any]:
    """q, k, v `[B, ., 1, .]`, real `[B]` (None: all), state a `FavorState`."""
    sinks, length = state.sink_k.shape[2], state.length.tolist()
    checks.lengths(gate.OP, "length", length, MOST_TOKENS)
    changes = {
        "far": not near or any((before + 1) % near == 0 for before in length),
        "sink": any(before < sinks for before in length),
        "block": near > 0,
    }
    before = {name: getattr(state, name).contiguous() for name in KEPT}
    after = {name: torch.empty_like(tensor) for name, tensor in before.items() if changes[name.partition("_")[0]]}
    numbers = {"sinks": sinks, "gaussian": int(gaussian), "near_blocks": int(near > 0), "block": near or 1}
    plan = make_plan(q, k, v, **map_numbers(map), **numbers)
    flags = None if real is None else real.contiguous()
    fields = {"real": flags, "length": state.length.contiguous()}
    out = _run(plan, (q, k, v), root, map_tensors(map), before, after, **fields)
    return out, state._replace(length=state.length + (1 if real is None else real), **{**before, **after})


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    real: Tensor | None,
    far_sum: Tensor,
    far_low: Tensor,
    feature_map: str,
    root: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and `far_sum` and `far_low` with the new token in them."""
    weight = float32(weight)
    map_heads = 1 if weight is None else weight.shape[0]
    numbers = {"kind": KINDS.index(feature_map), "map_heads": map_heads, "num_features": far_sum.shape[2], "block": 1}
    start = torch.zeros(q.shape[0], dtype=torch.int64, device="cpu")  # it has no positions
    before = {"far_sum": far_sum.contiguous(), "far_low": far_low.contiguous()}
    after = {name: torch.empty_like(tensor) for name, tensor in before.items()}
    plan, maps = make_plan(q, k, v, **numbers), {"query": weight, "key": weight}
    flags = None if real is None else real.contiguous()
    out = _run(plan, (q, k, v), root, maps, before, after, real=flags, length=start)
    return out, after["far_sum"], after["far_low"]
