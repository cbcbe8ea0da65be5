"""Linear attention by the C++ engine: the interface of `kernels.linear`."""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.cpu import problem
from subquad.kernels.cpu.gate import Plan
from subquad.kernels.cpu.library import Problem
from subquad.kernels.cpu.problem import KINDS, dense_rows, float32, make_plan, mask, parts_per_head
from subquad.kernels.cpu.run import run_backward, run_forward
from subquad.kernels.linear import LinearGradients, LinearInputs, LinearOptions
from subquad.kernels.problem import Saved

BLOCK = 32  # tokens: fewer products among the tokens of a block, which weigh more the fewer the features


class _MapGradients(NamedTuple):
    query: Tensor
    key: Tensor


def border_count(length: int, heads: int, num_features: int, options: LinearOptions) -> int:
    """How many states the forward keeps for the backward, however many heads there are."""
    if not options.borders:
        return 0
    block = problem.block_size(0, options.chunk or BLOCK, length)
    return problem.border_count(length, block, num_features) if options.causal else 1


def _problem(inputs: LinearInputs, options: LinearOptions) -> tuple[Plan, Problem]:
    q, k, v = (dense_rows(t) for t in inputs[:3] if t is not None)
    weight, alive = float32(inputs.weight), mask(inputs.alive, 1)
    num_features = k.shape[-1] if weight is None else weight.shape[1]
    block = problem.block_size(0, options.chunk or BLOCK, q.shape[2])
    plan = make_plan(
        *(q, k, v),
        kind=KINDS.index(options.feature_map),
        num_features=num_features,
        map_heads=1 if weight is None else weight.shape[0],
        mask_batch=1 if alive is None else alive.shape[0],
        causal=int(options.causal),
        block=block,
        blocks_per_segment=problem.blocks_per_segment(block, num_features),
        tile=block,
        stretches=parts_per_head(q.shape[0] * k.shape[1]),
    )
    far = {"far_max": float32(inputs.far_max), "far_sum": float32(inputs.far_sum)}
    return plan, plan.problem(options.root, q=q, k=k, v=v, query=weight, key=weight, alive=alive, **far)


def forward(inputs: LinearInputs, options: LinearOptions) -> tuple[Tensor, ...]:
    """As `kernels.linear.forward`."""
    plan, given = _problem(inputs, options)
    borders = border_count(inputs.q.shape[2], 0, given.num_features, options)
    return run_forward(plan, given, inputs.q, 1, (), borders)


def backward(
    inputs: LinearInputs,
    options: LinearOptions,
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    want_weight: bool = True,
) -> LinearGradients:
    """As `kernels.linear.backward`."""
    plan, given = _problem(inputs, options)
    heads, new = (inputs.q.shape[0], inputs.k.shape[1]), borders_sum.new_empty
    of_map, weight = None, new(0) if inputs.weight is None else torch.zeros_like(inputs.weight, dtype=torch.float32)
    if inputs.weight is not None and want_weight:
        shape = (*heads, *inputs.weight.shape[1:])
        of_map = _MapGradients(new(shape), new(shape))
    q, k, v, grad_state = run_backward(
        plan, given, inputs[:3], saved, borders_max, borders_sum, grad_far_sum, [], of_map
    )
    if of_map is not None:
        per_head = (of_map.query + of_map.key).sum(0)
        weight = per_head if weight.shape[0] > 1 else per_head.sum(0, keepdim=True)
    return LinearGradients(q, k, v, weight, new(0), grad_state)
