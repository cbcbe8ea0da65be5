"""Calls into the C++ engine: allocates what it fills."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.cpu.library import Backward, Forward, Problem, pointer
from subquad.kernels.cpu.problem import engine, float32, rows
from subquad.kernels.problem import Saved


def fill(structure: type, keep: list[Tensor], **fields: Any) -> Any:
    for name, value in fields.items():
        if isinstance(value, Tensor):
            keep.append(value)
            fields[name] = pointer(value)
    return structure(**fields)


def _shapes(given: Problem, maxima: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads = (given.batch, given.key_heads)
    return (*heads, maxima), (*heads, given.num_features, given.value_dim + 1)


def run_forward(
    given: Problem, q: Tensor, maxima: int, normaliser: tuple[int, ...], borders: int
) -> tuple[Tensor, ...]:
    """Output, normaliser, borders (max, sum), last state (max, sum), as the torch engines return them."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32)

    max_shape, sum_shape = _shapes(given, maxima)
    out, norm = new(*q.shape[:3], given.value_dim), new(*q.shape[:3], *normaliser)
    # maxima of linear attention are all zero, and the engine does not write them
    borders_max, borders_sum = torch.zeros(borders, *max_shape), new(borders, *sum_shape)
    far_max, far_sum = (torch.zeros(max_shape), new(*sum_shape)) if given.causal else (new(0), new(0))
    filled = fill(
        *(Forward, []),
        **{"out": out, "normaliser": norm, "borders_max": borders_max, "borders_sum": borders_sum},
        **{"far_max": far_max, "far_sum": far_sum},
    )
    engine().forward(ctypes.byref(given), ctypes.byref(filled))
    return out.to(q.dtype), norm, borders_max, borders_sum, far_max, far_sum


def run_backward(
    given: Problem,
    inputs: tuple[Tensor, ...],
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    sinks: list[Tensor],
    map: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in float32, and of the first state; those of `sinks` and `map` are added in place."""
    keep: list[Tensor] = []
    q, k, v = (torch.empty(t.shape, dtype=torch.float32) for t in inputs)
    grad_state = borders_sum.new_empty(0)
    if given.causal:
        grad_state = torch.zeros_like(borders_sum[0])
        if grad_far_sum is not None:
            grad_state.copy_(grad_far_sum)
    filled = fill(
        *(Backward, keep),
        **{"grad_out": rows(saved.grad_out, keep), "out": rows(saved.out, keep), "q": q, "k": k, "v": v},
        **{"normaliser": float32(saved.normaliser), "far_sum": grad_state},
        **{"borders_max": float32(borders_max), "borders_sum": float32(borders_sum)},
        **dict(zip(("sink_k", "sink_v"), sinks, strict=False)),
        **({} if map is None else map._asdict()),
    )
    engine().backward(ctypes.byref(given), ctypes.byref(filled))
    return q, k, v, grad_state
