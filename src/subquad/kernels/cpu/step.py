"""Decoding by the C++ engine: one token for every sequence of a batch in one call.

The caller's state is left alone: what changes is copied first, and what does not change is shared.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels.cpu.favor import map_fields
from subquad.kernels.cpu.library import Problem, Step
from subquad.kernels.cpu.problem import KINDS, engine, float32, make_problem
from subquad.kernels.cpu.run import fill


def _run(given: Problem, q: Tensor, keep: list[Tensor], **fields: Tensor) -> Tensor:
    out = torch.empty(*q.shape[:3], given.value_dim, dtype=torch.float32)
    filled = fill(Step, keep, out=out, **fields)
    engine().step(ctypes.byref(given), ctypes.byref(filled))
    return out.to(q.dtype)


def favor_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    map: FeatureMap,
    real: Tensor,
    state: Any,
    *,
    near: int,
    root: float,
    gaussian: bool,
) -> tuple[Tensor, Any]:
    """q, k, v `[B, ., 1, .]`, real `[B]`, state a `FavorState`."""
    sinks, length = state.sink_k.shape[2], state.length.tolist()
    far = (state.far_max, state.far_sum)
    if not near or any((before + 1) % near == 0 for before in length):
        far = tuple(t.clone() for t in far)
    kept = {name: getattr(state, name) for name in ("sink_k", "sink_v", "block_k", "block_v")}
    for name, tensor in kept.items():
        if name.startswith("block") or any(before < sinks for before in length):
            kept[name] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            kept[name] = tensor.contiguous()
    keep: list[Tensor] = []
    given = make_problem(
        *(q, k, v, keep),
        **map_fields(map),
        **{"sinks": sinks, "near_blocks": near > 0, "block": near or 1, "root": root, "gaussian": gaussian},
    )
    far_max, far_sum = (t.contiguous() for t in far)
    out = _run(
        given,
        q,
        keep,
        real=real.contiguous(),
        length=state.length.contiguous(),
        far_max=far_max,
        far_sum=far_sum,
        **kept,
    )
    return out, state._replace(length=state.length + real, far_max=far_max, far_sum=far_sum, **kept)


def linear_step(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, real: Tensor, far_sum: Tensor, feature_map: str, root: float
) -> tuple[Tensor, Tensor]:
    """Output, and `far_sum` with the new token in it."""
    keep: list[Tensor] = []
    weight, far_sum = float32(weight), far_sum.clone(memory_format=torch.contiguous_format)
    given = make_problem(
        *(q, k, v, keep),
        kind=KINDS.index(feature_map),
        num_features=far_sum.shape[2],
        map_heads=1 if weight is None else weight.shape[0],
        **{"query": weight, "key": weight, "block": 1, "root": root},
    )
    none = torch.zeros(q.shape[0], dtype=torch.int64)
    return _run(given, q, keep, real=real.contiguous(), length=none, far_max=none, far_sum=far_sum), far_sum
