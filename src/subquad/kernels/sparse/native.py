"""The engine of `torch.py` in C++ (`kernels/cpu/src/sparse.hpp`), for float32 on CPUs; what it computes is said there.

Letters as in `torch.py`.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from subquad.kernels.cpu import call
from subquad.kernels.cpu.sparse import SparsePlan, sparse_plan
from subquad.kernels.sparse.torch import Bounds, Inputs, Pairs


def forward(inputs: Inputs, pairs: Pairs, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
    plan = _plan(inputs, pairs)
    made = {name: plan.new(name) for name in ("out", "log_normaliser")}
    _run(plan, inputs, pairs, bounds, scale, made)
    return made["out"], made["log_normaliser"]


def backward(
    inputs: Inputs,
    pairs: Pairs,
    bounds: Bounds,
    scale: float,
    out: Tensor | None,
    log_normaliser: Tensor,
    grads: tuple[Tensor, Tensor],
) -> Inputs:
    plan = _plan(inputs, pairs)
    grad_out, shift = grads  # gradients of the output and of the log-normaliser
    made = {name: plan.new(name) for name in ("dq", "dk", "dv")}
    read = {"out": out, "log_normaliser": log_normaliser, "grad_out": grad_out, "shift": shift.double()}
    _run(plan, inputs, pairs, bounds, scale, read | made)
    return Inputs(*made.values())


def _plan(inputs: Inputs, pairs: Pairs) -> SparsePlan:
    (tiles, rows, head_dim), (blocks, keys, value_dim) = inputs.q.shape, inputs.v.shape
    sizes = {"tiles": tiles, "rows": rows, "blocks": blocks, "keys": keys, "met": pairs.blocks.shape[1]}
    rounds = 0 if pairs.q_code is None else pairs.q_code.shape[-1]
    dims = {"head_dim": head_dim, "value_dim": value_dim}
    return sparse_plan(pairs.q_place.dim() == 1, **sizes, rounds=rounds, **dims)


def _run(
    plan: SparsePlan,
    inputs: Inputs,
    pairs: Pairs,
    bounds: Bounds,
    scale: float,
    others: Mapping[str, Tensor | None],
) -> None:
    labels = {"q_place": pairs.q_place, "k_place": pairs.k_place, "q_code": pairs.q_code, "k_code": pairs.k_code}
    read = {**inputs._asdict(), "meets": pairs.blocks, **labels, "alive": pairs.alive, **others}
    dense = {name: None if tensor is None else tensor.contiguous() for name, tensor in read.items()}
    numbers = {name: int(bound) for name, bound in bounds._asdict().items()}
    given = plan.problem(torch.get_num_threads(), scale, numbers, dense)
    call.engine().sparse(ctypes.byref(given))
