"""The engines of `torch.py` and `native.py` as a torch operator, with its own gradients.

Letters as in `torch.py`.
"""

from typing import Any

from torch import Tensor

from subquad import checks
from subquad.kernels import arguments, engines
from subquad.kernels.operator import grad_or_zeros, make_operator, refuse_double_backward
from subquad.kernels.sparse import torch as sparse
from subquad.kernels.sparse.torch import Bounds, Inputs, Pairs

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor blocks, Tensor q_place, Tensor k_place, Tensor? q_code, Tensor? k_code, Tensor? alive, "
)
_NUMBERS = "int place_low, int place_high, int code_low, int code_high, int round, bool skip_self, float scale"
_TENSOR_COUNT = 9
_NAMES = ("q", "k", "v", *Pairs._fields)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, bounds: Bounds, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[N, C, Dv]` and log-normaliser `[N, C]` of queries `[N, C, D]` over the keys that they meet."""
    checks.no_transforms(q, k, v)
    return sparse_forward(q, k, v, *pairs, *bounds, scale)


def _problem(*args: Any) -> tuple[Inputs, Pairs, Bounds, float]:
    return Inputs(*args[:3]), Pairs(*args[3:_TENSOR_COUNT]), Bounds(*args[_TENSOR_COUNT:-1]), args[-1]


def _check(op: str, *args: Any) -> arguments.Sizes:
    return arguments.sparse(op, dict(zip(_NAMES, args[:_TENSOR_COUNT], strict=True)), args[-1])


def _check_saved(*args: Any) -> None:
    given = dict(zip(arguments.SPARSE_SAVED, args[:4], strict=True))
    _check("sparse_backward", *args[4:]).check(arguments.SPARSE_SAVED, given)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    _check("sparse_forward", *args)
    return engines.choose_sparse(args[0]).forward(*_problem(*args))


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    _check("sparse_forward", *args)
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=sparse.log_dtype(q))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_log_normaliser, out, log_normaliser, *rest = args
    _check_saved(*args)
    engine, grads = engines.choose_sparse(rest[0]), (grad_out, grad_log_normaliser)
    return tuple(g.contiguous() for g in engine.backward(*_problem(*rest), out, log_normaliser, grads))


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_saved(*args)
    return tuple(t.new_empty(t.shape) for t in args[4:7])


sparse_forward = make_operator("sparse_forward", _forward, _forward_fake, f"({_TENSORS}{_NUMBERS}) -> (Tensor, Tensor)")
sparse_backward = make_operator(
    "sparse_backward",
    _backward,
    _backward_fake,
    f"(Tensor grad_out, Tensor grad_log_normaliser, Tensor out, Tensor log_normaliser, {_TENSORS}{_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor)",
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[_TENSOR_COUNT:]
    ctx.save_for_backward(*output, *inputs[:_TENSOR_COUNT])


def _gradients(ctx: Any, grad_out: Tensor | None, grad_log_normaliser: Tensor | None) -> tuple:
    out, log_normaliser, *tensors = ctx.saved_tensors
    grads = grad_or_zeros(grad_out, out), grad_or_zeros(grad_log_normaliser, log_normaliser)
    gradients = sparse_backward(*grads, out, log_normaliser, *tensors, *ctx.numbers)
    return (*gradients, *[None] * (_TENSOR_COUNT - 3 + len(ctx.numbers)))


sparse_forward.register_autograd(_gradients, setup_context=_save)
sparse_backward.register_autograd(refuse_double_backward)
