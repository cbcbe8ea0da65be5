"""Linear attention by the C++ engine: the interface of `linear/torch.py`, and one token of decoding."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.kernels.cpu import call
from subquad.kernels.cpu.call import KINDS, dense_rows, float32, make_plan, mask, parts_per_head
from subquad.kernels.cpu.gate import Plan, StepPlan
from subquad.kernels.cpu.library import Problem
from subquad.kernels.linear.inputs import LinearInputs, LinearOptions
from subquad.kernels.problem import Gradients, Outputs, Saved

BLOCK = 32  # tokens: fewer products among the tokens of a block, which weigh more the fewer the features


def border_count(length: int, heads: int, num_features: int, options: LinearOptions) -> int:
    """How many states the forward keeps for the backward, however many heads there are."""
    if not options.borders:
        return 0
    block = call.block_size(0, options.chunk or BLOCK, length)
    return call.border_count(length, block, num_features) if options.causal else 1


def forward(inputs: LinearInputs, options: LinearOptions) -> Outputs:
    plan, given = _problem(inputs, options)
    borders = border_count(inputs.q.shape[2], 0, given.num_features, options)
    return call.run_forward(plan, given, inputs.q, borders)


def backward(inputs: LinearInputs, options: LinearOptions, saved: Saved, want_map: bool) -> Gradients:
    """Of all inputs that have one; of the projection if asked, of `far_sum` if it was given."""
    plan, given = _problem(inputs, options)
    weight, added = inputs.weight, {}
    if weight is not None and want_map:
        shape = (given.batch, given.key_heads, *weight.shape[1:])
        added = {name: saved.borders_sum.new_empty(shape) for name in ("query", "key")}
    gradients = call.run_backward(plan, given, inputs, saved, added)
    if weight is not None and want_map:
        per_head = (gradients.pop("query") + gradients.pop("key")).sum(0)
        gradients["weight"] = per_head if weight.shape[0] > 1 else per_head.sum(0, keepdim=True)
    return gradients


def _problem(inputs: LinearInputs, options: LinearOptions) -> tuple[Plan, Problem]:
    q, k, v = (dense_rows(t) for t in (inputs.q, inputs.k, inputs.v))
    weight, alive = float32(inputs.weight), mask(inputs.alive, 1)
    block = call.block_size(0, options.chunk or BLOCK, q.shape[2])
    plan = make_plan(
        q,
        k,
        v,
        kind=KINDS.index(options.feature_map),
        num_features=inputs.num_features,
        map_heads=1 if weight is None else weight.shape[0],
        mask_batch=1 if alive is None else alive.shape[0],
        causal=int(options.causal),
        block=block,
        blocks_per_segment=call.blocks_per_segment(block, inputs.num_features),
        tile=block,
        stretches=parts_per_head(q.shape[0] * k.shape[1]),
    )
    far = {"far_max": float32(inputs.far_max), "far_sum": float32(inputs.far_sum)}
    return plan, plan.problem(options.root, q=q, k=k, v=v, query=weight, key=weight, alive=alive, **far)


# Decoding -------------------------------------------------------------------------------------------------------------


CHANGED = (1, 2)  # of a state: sums, and what they were rounded by


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    features: int,
    real: Tensor | None,
    state: Sequence[Tensor],
    options: LinearOptions,
) -> tuple[Tensor, list[Tensor]]:
    """One token for every sequence: the output, and the tensors of the next state in the order of `LinearState`.

    features: of a token, those of the weight if there is one.
    """
    real = None if real is None else real.contiguous()
    kept = [tensor.contiguous() for tensor in state]
    return plain_step(dense_rows(q), dense_rows(k), dense_rows(v), float32(weight), features, real, kept, options)


def plain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    features: int,
    real: Tensor | None,
    state: Sequence[Tensor],
    options: LinearOptions,
) -> tuple[Tensor, list[Tensor]]:
    """The same of tensors that lie as C++ reads them: dense, but for the heads of q, k and v; the weight in float32."""
    map_heads = 1 if weight is None else weight.shape[0]
    plan = _step_plan(q.dtype, q.shape, k.shape, v.shape, map_heads, features, options, torch.get_num_threads())
    given = plan.given((q, k, v, weight, weight, None, None, None))
    out, new = call.run_step(plan, given, plan.read(real, None, state), state, CHANGED)
    return out if q.dtype is torch.float32 else out.to(q.dtype), new


@functools.lru_cache(maxsize=64)
def _step_plan(
    dtype: torch.dtype,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    map_heads: int,
    num_features: int,
    options: LinearOptions,
    threads: int,
) -> StepPlan:
    """Looked up with every token, so by what is at hand."""
    kind = KINDS.index(options.feature_map)
    return call.step_plan(
        dtype, (q, k, v), options.root, threads=threads, kind=kind, map_heads=map_heads, num_features=num_features
    )
