"""Which candidate each key head becomes: prices propose, and a measurement of the whole model decides.

Prices of single heads add up to an expectation. Errors of heads that work together may partly cancel, features may meet
other inputs in the converted model than those they were fitted to, and where a model is as sure of a word as when it
copies, gradients say little about what would make it wrong. So several views of the prices each make a choice.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import convert as checks
from subquad.conversion.budget import Budget, cheapest
from subquad.conversion.candidates import Candidate, Price, Priced
from subquad.conversion.measured import Measured

Choice = list[Tensor]  # int64 `[K]` for each layer: the candidates of its key heads


class View(NamedTuple):
    """copying: what prices of copying are multiplied by, beside the weight that the user gives them. without: kinds
    that are left out. share: of the loss that is allowed, where that is the budget."""

    copying: float = 0.0
    without: tuple[str, ...] = ()
    share: float = 1.0


VIEWS = (
    View(),
    View(copying=10),
    View(copying=20),
    View(copying=40),
    View(copying=20, without=("features",)),
    View(without=("features", "pages", "exact")),  # windows alone, the control
)
VIEWS_OF_LOSS = tuple(  # the smallest first
    View(copying=20, share=share) for share in (2.0, 1.0, 0.5, 0.25)
)


class Chosen(NamedTuple):
    choice: Choice
    measured: Measured


def best(found: Sequence[Candidate], tried: Sequence[Chosen], budget: Budget, copying: float) -> Chosen:
    """The one that loses least, or, where a loss is the budget, the first that keeps it: it is the smallest."""
    if budget.what != "loss":
        return min(tried, key=lambda one: one.measured.nats + copying * (one.measured.copying or 0.0))
    keep = [one for one in tried if one.measured.nats <= math.log1p(budget.share)]
    if not keep:
        raise checks.no_choice(str(budget), _kinds(found), math.expm1(min(one.measured.nats for one in tried)))
    return keep[0]


def proposals(found: Sequence[Candidate], layers: Sequence[Priced], budget: Budget, copying: float) -> Iterator[Choice]:
    """Different ones, one for each view at most. copying: nats of text that a nat of copying is worth."""
    made: list[Tensor] = []
    sizes = [len(layer.table(found).nats) for layer in layers]
    for view in VIEWS_OF_LOSS if budget.what == "loss" else VIEWS:
        chosen = _chosen(found, layers, budget, copying, view)
        if chosen is not None and not any(torch.equal(chosen, other) for other in made):
            made.append(chosen)
            yield list(chosen.split(sizes))
    if not made:
        raise checks.no_choice(str(budget), _kinds(found), _least(found, layers, budget))


def _chosen(
    found: Sequence[Candidate], layers: Sequence[Priced], budget: Budget, copying: float, view: View
) -> Tensor | None:
    """int64 `[N]`, of the key heads of all layers; None if the budget cannot be kept."""
    columns = [i for i, candidate in enumerate(found) if candidate.kind not in view.without]
    if not columns:
        return None
    value, cost, limit = _terms([found[i] for i in columns], layers, budget, copying * view.copying)
    limit *= view.share
    if cost.amin(1).sum().item() > limit:
        return None
    return torch.tensor(columns)[cheapest(value, cost, limit)]


def _terms(
    found: Sequence[Candidate], layers: Sequence[Priced], budget: Budget, copying: float
) -> tuple[Tensor, Tensor, float]:
    """What is to be small, `[N, C]`, what is budgeted, `[N, C]`, and the limit of its sum."""
    price = _table(found, layers)
    nats = price.nats + copying * price.copying
    if budget.what == "loss":
        return price.nbytes, nats, math.log1p(budget.share)
    if budget.what == "cache":
        return nats, price.nbytes, budget.share * _all_nbytes(found, layers)
    grows = torch.tensor([float(candidate.grows) for candidate in found], dtype=torch.float64).expand_as(nats)
    most = math.floor(budget.share * len(nats) + 1e-9)
    if budget.what == "exact":
        checks.some_heads(str(budget), len(nats), most)
    return nats, grows, float(most)


def _table(found: Sequence[Candidate], layers: Sequence[Priced]) -> Price:
    tables = [layer.table(found) for layer in layers]
    return Price(*(torch.cat(column) for column in zip(*tables, strict=True)))


def _all_nbytes(found: Sequence[Candidate], layers: Sequence[Priced]) -> float:
    return sum(len(layer.table(found).nats) * layer.all_nbytes for layer in layers)


def _least(found: Sequence[Candidate], layers: Sequence[Priced], budget: Budget) -> float:
    """The share of what is budgeted that the cheapest candidates of all heads take."""
    _, cost, _ = _terms(found, layers, budget, 0.0)
    least = cost.amin(1).sum().item()
    whole = {"cache": _all_nbytes(found, layers)}.get(budget.what, len(cost))
    return math.expm1(least) if budget.what == "loss" else least / whole


def _kinds(found: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.kind for candidate in found))
