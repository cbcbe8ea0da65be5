"""The engine of `buckets.py` as a torch operator: sizes inside depend on the data, those outside do not.

Letters as in `buckets.py`.
"""

from typing import Any

from torch import Tensor

from subquad import checks
from subquad.kernels import arguments
from subquad.kernels.operator import grad_or_zeros, make_operator, refuse_double_backward
from subquad.kernels.sparse import buckets
from subquad.kernels.sparse.buckets import Options, Problem
from subquad.kernels.sparse.torch import log_dtype

_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor q_code, Tensor k_code, bool causal, float scale, int tile"
_TENSORS = 5


def bucket_attention(q: Tensor, k: Tensor, v: Tensor, q_code: Tensor, k_code: Tensor, options: Options) -> Tensor:
    """`[B, H, T, Dv]` of q `[B, H, T, D]`; codes as in `Problem`."""
    checks.no_transforms(q, k, v)
    return bucket_forward(q, k, v, q_code, k_code, *options)[0]


def _problem(*args: Any) -> Problem:
    q, k, v, q_code, k_code, *options = args
    return Problem(q, k, v, q_code, k_code, Options(*options))


def _check(op: str, *args: Any) -> arguments.Sizes:
    tensors, options = dict(zip(arguments.BUCKETS, args[:_TENSORS], strict=True)), Options(*args[_TENSORS:])
    return arguments.buckets(op, tensors, options.scale, options.tile)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    _check("bucket_forward", *args)
    out, log_normaliser = buckets.forward(_problem(*args))
    return out.view(*q.shape[:3], v.shape[3]).to(q.dtype), log_normaliser.view(q.shape[:3])


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    _check("bucket_forward", *args)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=log_dtype(q))


def _check_saved(*args: Any) -> None:
    given = dict(zip(arguments.BUCKETS_SAVED, args[:3], strict=True))
    _check("bucket_backward", *args[3:]).check(arguments.BUCKETS_SAVED, given)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, out, log_normaliser, *rest = args
    _check_saved(*args)
    problem = _problem(*rest)
    rows = (x.to(problem.dtype).reshape(-1, x.shape[3]) for x in (out, grad_out))
    gradients = buckets.backward(problem, next(rows), log_normaliser.flatten(), next(rows))
    return tuple(g.view(t.shape).to(t.dtype) for g, t in zip(gradients, rest[:3], strict=True))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_saved(*args)
    return tuple(t.new_empty(t.shape) for t in args[3:6])


bucket_forward = make_operator("bucket_forward", _forward, _forward_fake, f"({_ARGUMENTS}) -> (Tensor, Tensor)")
bucket_backward = make_operator(
    "bucket_backward",
    _backward,
    _backward_fake,
    f"(Tensor grad_out, Tensor out, Tensor log_normaliser, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple:
    out, log_normaliser, *tensors = ctx.saved_tensors
    gradients = bucket_backward(grad_or_zeros(grad_out, out), out, log_normaliser, *tensors, *ctx.options)
    return (*gradients, *[None] * (_TENSORS - 3 + len(ctx.options)))


bucket_forward.register_autograd(_gradients, setup_context=_save)
bucket_backward.register_autograd(refuse_double_backward)
