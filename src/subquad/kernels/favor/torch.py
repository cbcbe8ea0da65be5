"""FAVOR attention in plain torch: any device, any float dtype, memory linear in the length, forward and backward.

Letters as in `blocks.py`.
"""

import torch

from subquad.kernels.centre import FarField
from subquad.kernels.favor.exact import ExactOnly
from subquad.kernels.favor.full import FullField
from subquad.kernels.favor.inputs import FavorInputs, FavorOptions
from subquad.kernels.favor.problem import FavorProblem, border_count
from subquad.kernels.favor.sweep import Sweep
from subquad.kernels.problem import NOWHERE, Gradients, Outputs, Saved

__all__ = ["backward", "border_count", "forward"]


def _sweeps(problem: FavorProblem) -> list[Sweep]:
    """No sweep at all: the full field, or none. Bidirectional near blocks: one forward, one back."""
    if not problem.options.far:
        return []
    if problem.options.causal:
        return [Sweep(problem)]
    return [Sweep(problem), Sweep(problem, reverse=True)] if problem.options.near else []


def forward(inputs: FavorInputs, options: FavorOptions) -> Outputs:
    problem = FavorProblem(inputs, options)
    target = problem.new_target((2,), options.borders and options.far)
    empty = problem.empty_state()
    count = border_count(problem.length, problem.batch * problem.heads, problem.num_features, options)
    borders = [state.new_empty(count, *state.shape) for state in (empty.max, empty.border())]
    final = (target.out.new_empty(0), target.out.new_empty(0))
    sweeps = _sweeps(problem)
    if not options.far:
        ExactOnly(problem).forward(target)
    elif not sweeps:
        summary = FullField(problem).forward(target)
        if options.borders:
            borders[0][0], borders[1][0] = summary.max, summary.border()
    at = 0
    for sweep in sweeps:
        count = len(sweep.segments())
        state = sweep.forward(target, borders[0][at : at + count], borders[1][at : at + count])
        final = (state.max, state.plain_sum()) if options.causal else final
        at += count
    normaliser = target.normaliser.masked_fill_(target.normaliser == -torch.inf, NOWHERE)
    out = target.out.to(inputs.q.dtype)
    return Outputs(out, normaliser, target.low, *borders, *(state.clone() for state in final))


def backward(inputs: FavorInputs, options: FavorOptions, saved: Saved, want_map: bool) -> Gradients:
    """Of all inputs that have one; of the feature map if asked. `far_sum` means something if causal."""
    problem = FavorProblem(inputs, options, want_map)
    into = problem.new_gradients()
    at = 0
    sweeps = _sweeps(problem)
    if not options.far:
        ExactOnly(problem).backward(saved, into)
    elif not sweeps:
        FullField(problem).backward(saved, FarField.from_border(saved.borders_max[0], saved.borders_sum[0]), into)
    for sweep in sweeps:
        into["far_sum"] = sweep.backward(saved, at, into)
        at += len(sweep.segments())
    return into | (problem.features.gradients or {})
