"""FAVOR attention in plain torch: any device, any float dtype, memory linear in the length, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.centre import FarField
from subquad.kernels.favor.full import FullField
from subquad.kernels.favor.problem import EngineOptions, FavorInputs, FavorProblem, Gradients, border_count
from subquad.kernels.favor.sweep import Sweep
from subquad.kernels.logs import MapGradients
from subquad.kernels.problem import NOWHERE, Saved

__all__ = ["EngineOptions", "FavorInputs", "FavorOutputs", "Saved", "backward", "border_count", "forward"]


class FavorOutputs(NamedTuple):
    """Output `[B, H, T, Dv]`, log-normalisers `[B, H, T, 2]` (far, exact), what rounding left out of the output (empty
    where nothing needs it), and far fields: at the borders that the backward starts from (max `[N, B, K, M]`, sum
    `[N, B, K, M + 1, V]`, whose last row is the centre), and after the last token (empty unless causal)."""

    out: Tensor
    lognorm: Tensor
    low: Tensor
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
    target = problem.new_target((2,), options.borders)
    empty = problem.empty_state()
    count = border_count(problem.length, problem.batch * problem.heads, problem.num_features, options)
    borders = [state.new_empty(count, *state.shape) for state in (empty.max, empty.border())]
    final = (target.out.new_empty(0), target.out.new_empty(0))
    if not (sweeps := _sweeps(problem)):
        summary = FullField(problem).forward(target)
        if options.borders:
            borders[0][0], borders[1][0] = summary.max, summary.border()
    at = 0
    for sweep in sweeps:
        count = len(sweep.segments())
        state = sweep.forward(target, borders[0][at : at + count], borders[1][at : at + count])
        final = (state.max, state.plain_sum()) if options.causal else final
        at += count
    lognorm = target.normaliser.masked_fill_(target.normaliser == -torch.inf, NOWHERE)
    out = target.out.to(inputs.q.dtype)
    return FavorOutputs(out, lognorm, target.low, *borders, *(state.clone() for state in final))


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
        FullField(problem).backward(saved, FarField.from_border(borders_max[0], borders_sum[0]), into)
    for sweep in sweeps:
        count = len(sweep.segments())
        borders = borders_max[at : at + count], borders_sum[at : at + count]
        of_state = sweep.backward(saved, *borders, grad_far_sum, into)
        grad_state = of_state if options.causal else grad_state
        at += count
    return into, grad_state, problem.features.gradients
