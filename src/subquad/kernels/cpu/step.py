"""Decoding by the C++ engine: one token for every sequence of a batch in one call.

The caller's state is left alone: what changes is copied first, and what does not change is shared.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels.cpu.library import DTYPES, KEPT, Problem, Step, array, dense_rows
from subquad.kernels.cpu.problem import KINDS, RULES, engine, float32
from subquad.kernels.cpu.run import fill


@functools.lru_cache(maxsize=64)
def _template(**numbers: int) -> Problem:
    """A problem without pointers: those are all that changes from token to token."""
    return Problem(**numbers)


def _run(
    shape: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, root: float, maps: dict[str, Tensor | None], **fields: Any
) -> Tensor:
    """`shape`: numbers of the problem that the tensors do not tell."""
    q, k, v = (dense_rows(t) for t in (q, k, v))
    batch, heads, _, head_dim = q.shape
    key_heads, value_dim = k.shape[1], v.shape[3]
    given = Problem.from_buffer_copy(
        _template(
            dtype=DTYPES[q.dtype],
            batch=batch,
            key_heads=key_heads,
            groups=heads // key_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            threads=torch.get_num_threads(),
            **{"length": 1, "key_length": 1, "slices": 1, "mask_batch": 1, "tile": 1},
            **shape,
        )
    )
    given.root, given.q, given.k, given.v = root, array(q), array(k), array(v)
    for name, tensor in maps.items():
        setattr(given, name, None if tensor is None else tensor.data_ptr())
    out = torch.empty(batch, heads, 1, value_dim, dtype=torch.float32)
    filled = fill(Step, [], out=out, **fields)
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
    changes = {
        "far": not near or any((before + 1) % near == 0 for before in length),
        "sink": any(before < sinks for before in length),
        "block": near > 0,
    }
    kept = {name: getattr(state, name).contiguous() for name in KEPT}
    new = {name: torch.empty_like(tensor) for name, tensor in kept.items() if changes[name.partition("_")[0]]}
    shape = {
        **{"kind": KINDS.index("exp"), "rule": RULES.index(map.rule), "rule_groups": map.groups},
        **{"map_heads": map.query.shape[0], "num_features": map.num_features, "sinks": sinks},
        **{"gaussian": int(gaussian), "near_blocks": int(near > 0), "block": near or 1},
    }
    maps = {
        **{"query": float32(map.query), "key": float32(map.key), "key_bias": float32(map.key_bias)},
        **{"offset_weight": float32(map.offset_weight), "offset_bias": float32(map.offset_bias)},
    }
    flags = None if real is None else real.contiguous()
    fields = {"real": flags, "length": state.length.contiguous(), **kept, **{f"new_{k}": t for k, t in new.items()}}
    out = _run(shape, q, k, v, root, maps, **fields)
    after = state.length + (1 if real is None else real)
    return out, state._replace(length=after, **{**kept, **new})


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
    shape = {"kind": KINDS.index(feature_map), "num_features": far_sum.shape[2], "block": 1}
    shape["map_heads"] = 1 if weight is None else weight.shape[0]
    none = torch.zeros(q.shape[0], dtype=torch.int64)
    flags = None if real is None else real.contiguous()
    kept = {"far_sum": far_sum.contiguous(), "far_low": far_low.contiguous()}
    new = {f"new_{name}": torch.empty_like(tensor) for name, tensor in kept.items()}
    out = _run(shape, q, k, v, root, {"query": weight, "key": weight}, real=flags, length=none, **kept, **new)
    return out, new["new_far_sum"], new["new_far_low"]
