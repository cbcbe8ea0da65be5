"""What is proposed, and which of it is taken."""

import math
from dataclasses import replace

import pytest
import torch

from subquad import errors
from subquad.conversion.budget import Budget
from subquad.conversion.candidates import Candidate, Price, Priced
from subquad.conversion.choosing import Chosen, best, proposals
from subquad.conversion.measured import Measured

FOUND = [
    Candidate("window", "window", {"window": 32}),
    Candidate("features", "favor", {}),
    Candidate("exact", "softmax", {}),
]


def priced(nats: list[list[float]], copying: list[list[float]], nbytes: tuple[float, ...]) -> Priced:
    """Prices `[K][C]` of one layer, in the order of FOUND."""
    table = (torch.tensor(x, dtype=torch.float64).T for x in (nats, copying))
    names = [str(candidate) for candidate in FOUND]
    prices = {
        name: Price(a, b, torch.full_like(a, size)) for name, a, b, size in zip(names, *table, nbytes, strict=True)
    }
    return Priced(prices, nbytes[-1], {})


LAYERS = [  # the first head of each layer gains most by exactness in text, the second one where text is copied
    priced([[3e-3, 2e-3, 0], [2e-3, 1e-3, 0]], [[1e-4, 1e-4, 0], [2e-2, 2e-2, 0]], (1.0, 2.0, 10.0)),
    priced([[1e-3, 2e-4, 0], [1e-3, 2e-4, 0]], [[1e-4, 1e-4, 0], [1e-4, 1e-4, 0]], (1.0, 2.0, 10.0)),
]


def proposed(budget: Budget, copying: float) -> list[list[int]]:
    return [torch.cat(choice).tolist() for choice in proposals(FOUND, LAYERS, budget, copying)]


def test_views_propose_different_choices() -> None:
    assert proposed(Budget("exact", 0.25), 0.0) == [[2, 1, 1, 1], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert proposed(Budget("exact", 0.25), 0.05) == [[2, 1, 1, 1], [1, 2, 1, 1], [0, 2, 0, 0], [0, 0, 0, 0]]
    assert proposed(Budget("constant", 0.0), 0.05) == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_the_best_is_what_measures_best() -> None:
    """Prices have no say in it, and copying has as much as it was given."""
    budget = Budget("exact", 0.25)
    choices = list(proposals(FOUND, LAYERS, budget, 0.05))
    measured = [Measured(0.01, 0.9), Measured(0.02, 0.1), Measured(0.03, 0.05), Measured(0.005, 2.0)]
    tried = [Chosen(*both) for both in zip(choices, measured, strict=True)]
    for copying, want in ((0.0, 3), (0.05, 1), (0.005, 0)):
        assert best(FOUND, tried, budget, copying) is tried[want]
    silent = [Chosen(choice, replace(one, copying=None)) for choice, one in zip(choices, measured, strict=True)]
    assert best(FOUND, silent, budget, 0.05) is silent[3]


def test_a_loss_is_kept_by_what_is_measured() -> None:
    budget = Budget("loss", 0.002)
    choices = list(proposals(FOUND, LAYERS, budget, 0.0))
    assert len(choices) >= 3
    sizes = [sum((1.0, 2.0, 10.0)[i] for i in torch.cat(choice).tolist()) for choice in choices]
    nats = [math.log1p(0.002) * (1.5 if size == min(sizes) else 0.9) for size in sizes]
    tried = [Chosen(choice, Measured(x, None)) for choice, x in zip(choices, nats, strict=True)]
    second = sorted(sizes)[1]
    assert best(FOUND, tried, budget, 0.0) is tried[sizes.index(second)]
    lost = [one._replace(measured=Measured(math.log1p(0.05), None)) for one in tried]
    with pytest.raises(errors.ConfigError) as raised:
        best(FOUND, lost, budget, 0.0)
    assert str(raised.value) == (
        "convert: no choice of kinds (window, features, exact) keeps the budget 'loss 0.2%': the least there is takes "
        "5.0 %; allow more, or a smaller window or fewer features"
    )
