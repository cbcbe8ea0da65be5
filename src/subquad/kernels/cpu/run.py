"""Calls into the C++ engine: allocates what it fills."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.centre import LOW
from subquad.kernels.cpu.gate import Plan
from subquad.kernels.cpu.library import Backward, Forward, Problem
from subquad.kernels.cpu.problem import dense_rows, engine, float32
from subquad.kernels.problem import Saved, keeps_low


def _shapes(given: Problem, maxima: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads = (given.batch, given.key_heads)
    return (*heads, maxima), (*heads, given.num_features, given.value_dim + 1)


def run_forward(
    plan: Plan, given: Problem, q: Tensor, maxima: int, normaliser: tuple[int, ...], borders: int
) -> tuple[Tensor, ...]:
    """Output, normaliser, low part, borders (max, sum), last state (max, sum), as the torch engines return them."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    max_shape, sum_shape = _shapes(given, maxima)
    border_shape = (*sum_shape[:2], given.num_features + 1, given.value_dim + 1)  # and a centre
    out, norm = new(*q.shape[:3], given.value_dim), new(*q.shape[:3], *normaliser)
    low = torch.empty(out.shape if keeps_low(q, borders > 0) else 0, dtype=LOW, device="cpu")
    # maxima of linear attention are all zero, and the engine does not write them
    borders_max, borders_sum = new(borders, *max_shape).zero_(), new(borders, *border_shape)
    far_max, far_sum = (new(*max_shape).zero_(), new(*sum_shape)) if given.causal else (new(0), new(0))
    filled = plan.fill(
        Forward(),
        **{"out": out, "normaliser": norm, "low": low if low.numel() else None},
        **({"borders_max": borders_max, "borders_sum": borders_sum} if borders else {}),
        **({"far_max": far_max, "far_sum": far_sum} if given.causal else {}),
    )
    engine().forward(ctypes.byref(given), ctypes.byref(filled))
    return out.to(q.dtype), norm, low, borders_max, borders_sum, far_max, far_sum


def run_backward(
    plan: Plan,
    given: Problem,
    inputs: tuple[Tensor, ...],
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    sinks: list[Tensor],
    map: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in float32, and of the first state; those of `sinks` and `map` are filled in place."""
    q, k, v = (torch.empty(t.shape, dtype=torch.float32, device="cpu") for t in inputs)
    grad_state = borders_sum.new_empty(0)
    if given.causal:
        grad_state = borders_sum.new_empty(_shapes(given, 1)[1])
    filled = plan.fill(
        Backward(),
        **{"grad_out": dense_rows(saved.grad_out), "out": dense_rows(saved.out), "q": q, "k": k, "v": v},
        **{"normaliser": float32(saved.normaliser), "low": saved.low},
        **({"last_far_sum": float32(grad_far_sum), "far_sum": grad_state} if given.causal else {}),
        **{"borders_max": float32(borders_max), "borders_sum": float32(borders_sum)},
        **dict(zip(("sink_k", "sink_v"), sinks, strict=False)),
        **({} if map is None else {name: grad if grad.numel() else None for name, grad in map._asdict().items()}),
    )
    engine().backward(ctypes.byref(given), ctypes.byref(filled))
    return q, k, v, grad_state
