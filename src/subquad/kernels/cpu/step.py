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
from subquad.kernels.cpu.favor import map_tensors
from subquad.kernels.cpu.gate import Plan
from subquad.kernels.cpu.library import KEPT, Step
from subquad.kernels.cpu.problem import dense_rows, engine, float32, step_plan, told_by

NEW = {name: f"new_{name}" for name in KEPT}  # where a tensor goes that changes
FAR, SINKS, BLOCKS = (tuple(n for n in KEPT if n.startswith(part)) for part in ("far", "sink", "block"))


def _run(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    root: float,
    maps: dict[str, Tensor | None],
    fields: dict[str, Tensor | None],
) -> Tensor:
    given = plan.problem(root, True, q=dense_rows(q), k=dense_rows(k), v=dense_rows(v), **maps)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device="cpu")
    filled = plan.fill(Step(), out=out, **fields)
    engine().step(ctypes.byref(given), ctypes.byref(filled))
    return out if q.dtype is torch.float32 else out.to(q.dtype)


def favor_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    real: Tensor | None,
    state: Any,
    *,
    near: int,
    sinks: int,
    root: float,
    gaussian: bool,
) -> tuple[Tensor, Any]:
    """q, k, v `[B, ., 1, .]`, real `[B]` (None: all), state a `FavorState`."""
    numbers = map.num_features, map.query.shape[0], map.rule, map.groups, sinks, gaussian, near
    plan = step_plan(told_by(q, k, v), "exp", *numbers)
    length = plan.checked(Step, "length", state.length.contiguous()).tolist()
    checks.lengths(gate.OP, "length", length, MOST_TOKENS)
    changed = _changed(length, near, sinks)
    before = {name: getattr(state, name).contiguous() for name in KEPT}
    after = {name: torch.empty_like(before[name]) for name in changed}
    fields = {**before, "length": state.length.contiguous(), "real": None if real is None else real.contiguous()}
    for name in changed:
        fields[NEW[name]] = after[name]
    out = _run(plan, q, k, v, root, map_tensors(map), fields)
    return out, state._replace(length=state.length + (1 if real is None else real), **before | after)


def _changed(length: list[int], near: int, sinks: int) -> tuple[str, ...]:
    """The tensors of a state that one more token changes."""
    fold = not near or any((before + 1) % near == 0 for before in length)
    sink = any(before < sinks for before in length)
    return (FAR if fold else ()) + (SINKS if sink else ()) + (BLOCKS if near else ())


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
    plan = step_plan(told_by(q, k, v), feature_map, far_sum.shape[2], map_heads)
    start = torch.zeros(q.shape[0], dtype=torch.int64, device="cpu")  # it has no positions
    far_sum, far_low = far_sum.contiguous(), far_low.contiguous()
    new_sum, new_low = torch.empty_like(far_sum), torch.empty_like(far_low)
    fields = {
        "real": None if real is None else real.contiguous(),
        "length": start,
        **{"far_sum": far_sum, "far_low": far_low},
        **{"new_far_sum": new_sum, "new_far_low": new_low},
    }
    out = _run(plan, q, k, v, root, {"query": weight, "key": weight}, fields)
    return out, new_sum, new_low
