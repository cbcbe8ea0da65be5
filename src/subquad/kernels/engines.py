"""Which engine does the work: torch anywhere, or the C++ one on CPUs."""

import torch
from torch import Tensor

from subquad import checks
from subquad.kernels.cpu import library
from subquad.kernels.cpu.gate import has_own_operations


def choose_engine(op: str, backend: str, q: Tensor, *, signed: bool = False) -> str:
    """ "cpu" where it can and `backend` lets it, "torch" otherwise. signed: features that may be negative."""
    if backend == "torch":
        return "torch"
    reason = _obstacle(q, signed)
    if reason is None:
        return "cpu"
    if backend == "cpu":
        raise checks.no_cpu_engine(op, reason)
    return "torch"


def step_engine(op: str, backend: str, q: Tensor, *others: Tensor | None) -> str:
    """The engine for one token more: gradients and compiled graphs go through torch's own operations."""
    engine = choose_engine(op, backend, q)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *others))
    traced = torch.compiler.is_compiling() or (type(q) is not Tensor and has_own_operations(q))
    return "torch" if gradients or traced else engine


def _obstacle(q: Tensor, signed: bool) -> str | None:
    if not library.AVAILABLE:
        return library.PROBLEM
    if not q.is_cpu:
        return f"the tensors are on {q.device.type}"
    if q.dtype not in library.DTYPES:
        return f"it computes in float32, and the tensors are {str(q.dtype).removeprefix('torch.')}"
    return "it has no signed (trigonometric) features" if signed else None
