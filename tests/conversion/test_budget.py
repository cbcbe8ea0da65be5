"""Candidates within a budget, against all combinations there are."""

import itertools

import pytest
import torch
from torch import Tensor

from subquad.conversion.budget import cheapest


def best(value: Tensor, cost: Tensor, limit: float) -> float:
    """The smallest sum of values that there is."""
    heads = range(len(value))
    combinations = (list(zip(heads, chosen, strict=True)) for chosen in itertools.product(range(3), repeat=len(value)))
    within = (pairs for pairs in combinations if sum(cost[pair].item() for pair in pairs) <= limit)
    return min(sum(value[pair].item() for pair in pairs) for pairs in within)


def sums(chosen: Tensor, *tables: Tensor) -> list[float]:
    return [table.gather(1, chosen[:, None]).sum().item() for table in tables]


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_is_much_better(seed: int) -> None:
    """What Lagrange leaves is at most the largest gain of one head."""
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(6, 3, generator=generator, dtype=torch.float64).sort(1).values
    value = torch.rand(6, 3, generator=generator, dtype=torch.float64).sort(1, descending=True).values
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        limit = (cost[:, 0].sum() + share * (cost[:, -1] - cost[:, 0]).sum()).item() + 1e-12
        got_value, got_cost = sums(cheapest(value, cost, limit), value, cost)
        assert got_cost <= limit
        assert best(value, cost, limit) <= got_value + 1e-12
        assert got_value <= best(value, cost, limit) + (value[:, 0] - value[:, -1]).max().item()


def test_a_number_of_heads_is_met_exactly() -> None:
    """The heads that gain most by it become what costs 1."""
    value = torch.tensor([[5.0, 0], [1, 0], [3, 0], [4, 0]], dtype=torch.float64)
    cost = torch.tensor([[0.0, 1]] * 4, dtype=torch.float64)
    for count, want in ((0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (2, [1, 0, 0, 1]), (3, [1, 0, 1, 1]), (4, [1, 1, 1, 1])):
        assert cheapest(value, cost, count).tolist() == want


def test_equal_heads_get_what_fits() -> None:
    """All have the same price; the rest is spent head by head."""
    value = torch.tensor([[1.0, 0]] * 5, dtype=torch.float64)
    cost = torch.tensor([[0.0, 1]] * 5, dtype=torch.float64)
    assert cheapest(value, cost, 3).sum() == 3


def test_what_costs_nothing_is_taken() -> None:
    value = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    assert cheapest(value, torch.zeros_like(value), 0).tolist() == [1]
