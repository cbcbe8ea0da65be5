"""Whether one token of decoding can go straight to the C++ engine."""

from typing import Any

import torch
from torch import Tensor

from subquad import checks
from subquad.kernels.cpu import library


def takes_plain_step(backend: str, q: Tensor, k: Tensor, v: Tensor, state: Any, kind: Any) -> bool:
    """Whether the C++ engine's gate alone can judge one token more: plain tensors of one, nothing to differentiate.

    Then all that `extend` checks is checked there, once and not twice; if it refuses, `extend` says why in its words.
    """
    if backend not in ("auto", "cpu") or not library.AVAILABLE:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if type(state) is not kind or len(state) != len(kind._fields) or checks.transformed() or checks.forward_mode():
        return False
    for tensor in (q, k, v):  # whose shapes are asked for before the gate sees them; a loop is sooner done than calls
        if type(tensor) is not Tensor or tensor.is_nested:
            return False
    return q.is_cpu and q.dtype in library.DTYPES and q.dim() == 4 and q.shape[2] == 1
