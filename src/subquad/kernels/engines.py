"""Which engine does the work: torch anywhere, or the C++ one on CPUs."""

from typing import Any

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


def takes_plain_step(backend: str, q: Tensor, k: Tensor, v: Tensor, state: Any, kind: Any) -> bool:
    """Whether the C++ engine's gate alone can judge one token more: plain tensors of one, nothing to differentiate.

    Then all that `extend` checks is checked there, once and not twice; if it refuses, `extend` says why in its words.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or backend == "torch" or not library.AVAILABLE:
        return False
    if type(state) is not kind or len(state) != len(kind._fields) or checks.transformed() or checks.forward_mode():
        return False
    if not all(map(_is_plain, (q, k, v, *state))):
        return False
    return q.dtype in library.DTYPES and q.dim() == k.dim() == v.dim() == 4 and _are_single_tokens(q, k)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def _are_single_tokens(q: Tensor, k: Tensor) -> bool:
    return q.shape[2] == k.shape[2] == 1 and k.shape[1] > 0


def _obstacle(q: Tensor, signed: bool) -> str | None:
    if not library.AVAILABLE:
        return library.PROBLEM
    if not q.is_cpu:
        return f"the tensors are on {q.device.type}"
    if q.dtype not in library.DTYPES:
        return f"it computes in float32, and the tensors are {str(q.dtype).removeprefix('torch.')}"
    return "it has no signed (trigonometric) features" if signed else None
