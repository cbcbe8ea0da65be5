"""The engine of `choice.py` in C++ (`kernels/cpu/src/choice.hpp`), for float32 on CPUs; what it computes is said there.

Letters as in `choice.py`.
"""

import ctypes

import torch
from torch import Tensor

from subquad.kernels.cpu import call
from subquad.kernels.cpu.choice import choice_plan
from subquad.kernels.sparse.choice import Extremes


def choose(q: Tensor, extremes: Extremes, candidates: Tensor, width: int) -> Tensor:
    batch, key_heads, groups, length, dim = q.shape
    plan = choice_plan(
        rows=candidates.shape[0],
        lines=batch * key_heads,
        groups=groups,
        length=length,
        pages=extremes.high.shape[2],
        head_dim=dim,
        width=width,
    )
    q, high, low = (x.flatten(0, 1).contiguous() for x in (q, *extremes))
    chosen = plan.new("chosen")
    given = plan.problem(
        torch.get_num_threads(), q=q, high=high, low=low, candidates=candidates.contiguous(), chosen=chosen
    )
    call.engine().choose(ctypes.byref(given))
    return chosen.view(batch, key_heads, groups, length, width)
