"""The engines of `choice.py` and `choice_native.py` as a torch operator. A choice has no gradient.

Letters as in `choice.py`.
"""

import torch
from torch import Tensor

from subquad import checks
from subquad.kernels import arguments, engines
from subquad.kernels.operator import make_operator
from subquad.kernels.sparse.choice import Extremes


@torch.no_grad()
def choose(q: Tensor, extremes: Extremes, candidates: Tensor, pages: int) -> Tensor:
    """As in `choice.py`; W is `pages`, or P if that is less."""
    checks.no_transforms(q, *extremes)
    width = min(pages, extremes.high.shape[2])
    if not width:
        return candidates.new_zeros(*q.shape[:4], 0)
    return choose_pages(q, *extremes, candidates, width)


def _choose(q: Tensor, high: Tensor, low: Tensor, candidates: Tensor, width: int) -> Tensor:
    arguments.choice("choose_pages", {"q": q, "high": high, "low": low, "candidates": candidates}, width)
    return engines.choose_choice(q).choose(q, Extremes(high, low), candidates, width)


def _choose_fake(q: Tensor, high: Tensor, low: Tensor, candidates: Tensor, width: int) -> Tensor:
    arguments.choice("choose_pages", {"q": q, "high": high, "low": low, "candidates": candidates}, width)
    return candidates.new_empty(*q.shape[:4], width)


choose_pages = make_operator(
    "choose_pages",
    _choose,
    _choose_fake,
    "(Tensor q, Tensor high, Tensor low, Tensor candidates, int width) -> Tensor",
)
