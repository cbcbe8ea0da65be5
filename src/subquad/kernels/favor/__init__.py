"""FAVOR attention in plain torch: any device, any float dtype, memory linear in the length, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.favor.full import FullField
from subquad.kernels.favor.problem import EngineOptions, FavorInputs, FavorProblem, Gradients, border_count
from subquad.kernels.favor.sweep import Sweep
from subquad.kernels.logs import MapGradients
from subquad.kernels.problem import NOWHERE, Saved

__all__ = ["EngineOptions", "FavorInputs", "FavorOutputs", "Saved", "backward", "border_count", "forward"]


class FavorOutputs(NamedTuple):
    """Output `[B, H, T, Dv]`, log-normalisers `[B, H, T, 2]` (far, exact), and far fields (max `[.., B, K, M]`, sum
    `[.., B, K, M, V]`) at the borders the backward starts from, and after the last token (empty unless causal)."""

    out: Tensor
    lognorm: Tensor
    borders_max: Tensor
    borders_sum: Tensor
    far_max: Tensor
    far_sum: Tensor


def _sweeps(problem: FavorProblem) -> list[Sweep]:
    """No sweep at all: the full field. Bidirectional near blocks: one forward, one back."""
    if problem.options.causal:
        return [Sweep(problem)]
    return [Sweep(problem), Sweep(problem, reverse=True)] if problem.options.near else []


def forward(inputs: FavorInputs, options: EngineOptions) -> FavorOutputs:
    problem = FavorProblem(inputs, options)
    out = inputs.q.new_empty(*inputs.q.shape[:3], problem.value_dim, dtype=problem.dtype)
    lognorm = out.new_empty(*out.shape[:3], 2)
    empty = problem.empty_state()
    count = border_count(problem.length, problem.batch * problem.heads, problem.num_features, options)
    borders = [state.new_empty(count, *state.shape) for state in empty]
    final = tuple(state.new_empty(0) for state in empty)
    if not (sweeps := _sweeps(problem)):
        summary = FullField(problem).forward(out, lognorm)
        if options.borders:
            borders[0][0], borders[1][0] = summary
    at = 0
    for sweep in sweeps:
        count = len(sweep.segments())
        state = sweep.forward(out, lognorm, borders[0][at : at + count], borders[1][at : at + count])
        final = state if options.causal else final
        at += count
    lognorm.masked_fill_(lognorm == -torch.inf, NOWHERE)
    return FavorOutputs(out.to(inputs.q.dtype), lognorm, *borders, *(state.clone() for state in final))


def backward(
    inputs: FavorInputs,
    options: EngineOptions,
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    want_map_gradients: bool,
) -> tuple[Gradients, Tensor, MapGradients | None]:
    """Gradients of the tensors, of the initial `far_sum` (empty unless causal), and of the feature map when asked."""
    problem = FavorProblem(inputs, options, want_map_gradients)
    into = problem.new_gradients()
    grad_state = borders_sum.new_empty(0)
    at = 0
    if not (sweeps := _sweeps(problem)):
        FullField(problem).backward(saved, borders_max[0], borders_sum[0], into)
    for sweep in sweeps:
        count = len(sweep.segments())
        borders = borders_max[at : at + count], borders_sum[at : at + count]
        of_state = sweep.backward(saved, *borders, grad_far_sum, into)
        grad_state = of_state if options.causal else grad_state
        at += count
    return into, grad_state, problem.features.gradients
