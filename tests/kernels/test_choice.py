"""Choices of pages in C++ against the torch engine, and what the operator and the gate refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import errors
from subquad.kernels.cpu import library
from subquad.kernels.cpu.choice import choice_plan
from subquad.kernels.sparse import choice, choice_native
from subquad.kernels.sparse.choice import Extremes
from threads import threads

native = pytest.mark.skipif(not library.AVAILABLE, reason=library.WHY_MISSING)

SIZES = {  # batch, key heads, groups, queries, pages, head dim, pages that are chosen
    "one of all": (1, 1, 1, 1, 1, 1, 1),
    "odd sizes": (2, 3, 2, 19, 37, 5, 4),
    "whole panels": (1, 2, 3, 32, 128, 64, 16),
    "a page more than a panel": (1, 1, 2, 33, 33, 16, 3),
    "all but one": (2, 1, 1, 7, 70, 8, 69),
    "few queries": (2, 2, 2, 3, 70, 21, 5),
    "one query": (1, 3, 3, 1, 130, 64, 16),
    "all": (2, 1, 2, 7, 40, 8, 40),
}


def problem(name: str, whole: bool = False) -> tuple[Tensor, Extremes, Tensor, int]:
    """whole: numbers whose products and sums are exact, and often equal."""
    batch, heads, groups, queries, pages, dim, width = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, groups, queries, dim, generator=generator)
    k = torch.randn(batch, heads, pages, 4, dim, generator=generator)
    if whole:
        q, k = q.round(), k.round()
    candidates = torch.randint(pages + 1, (batch, queries), generator=generator)
    return q, choice.extremes(k), candidates, width


def alike(got: Tensor, want: Tensor) -> bool:
    """The same pages; their order is no part of a choice."""
    return torch.equal(got.sort(-1).values, want.sort(-1).values)


@native
@pytest.mark.parametrize("whole", [False, True], ids=["any numbers", "many ties"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_it_chooses_what_the_torch_engine_chooses(name: str, count: int, whole: bool) -> None:
    q, found, candidates, width = problem(name, whole)
    for rows in (candidates, candidates[:1]):
        want = choice.choose(q, found, rows, width)
        with threads(count):
            got = choice_native.choose(q, found, rows, width)
        assert alike(got, want)
        listed = want.sort(-1).values
        inside = (listed < rows[:, None, None, :, None]).sum(-1)
        assert torch.equal(inside, rows.clamp(max=width)[:, None, None].expand_as(inside)), "as many as there are"


@pytest.mark.parametrize("engine", [choice, pytest.param(choice_native, marks=native)], ids=["torch", "cpu"])
def test_ties_go_to_earlier_pages(engine: Any) -> None:
    q, found, candidates, width = problem("odd sizes")
    same = Extremes(*(x[:, :, :1].expand_as(x).contiguous() for x in found))
    chosen = engine.choose(q, same, candidates, width).sort(-1).values
    want = torch.arange(width).expand_as(chosen)
    want = torch.where(want < candidates[:, None, None, :, None], want, found.high.shape[2])
    assert torch.equal(chosen, want)


@pytest.mark.parametrize("engine", [choice, pytest.param(choice_native, marks=native)], ids=["torch", "cpu"])
@pytest.mark.parametrize("queries", [19, 2])
def test_nan_is_the_largest_bound(engine: Any, queries: int) -> None:
    q, found, candidates, width = problem("odd sizes")
    q, candidates = q[:, :, :, :queries], candidates[:, :queries]
    found.high[0, 0, 5] = found.low[0, 0, 5] = torch.nan
    chosen = engine.choose(q, found, torch.full_like(candidates, 37), width)
    assert bool((chosen[0, 0] == 5).any(-1).all())
    assert bool((chosen < 37).all())


@pytest.mark.parametrize("engine", [choice, pytest.param(choice_native, marks=native)], ids=["torch", "cpu"])
def test_near_ties_of_float32_are_none(engine: Any) -> None:
    """Sums that float32 cannot tell apart, whatever their order: 1 + 2**-30 twice, and terms that cancel."""
    q = torch.ones(1, 1, 1, 2, 4)
    numbers = [[2.0**20, -(2.0**20), 1, 0], [2.0**20, -(2.0**20), 1, 2.0**-30], [1, 0, 0, 0]]
    k = torch.tensor(numbers).view(1, 1, 3, 1, 4)
    chosen = engine.choose(q, choice.extremes(k), torch.full((1, 2), 3), 1)
    assert chosen.flatten().tolist() == [1, 1]


@native
def test_candidates_that_there_are_not_are_passed_over() -> None:
    q, found, candidates, width = problem("odd sizes")
    for number, nearest in ((-1, 0), (-(2**62), 0), (38, 37), (2**62, 37)):
        got = choice_native.choose(q, found, torch.full_like(candidates, number), width)
        assert torch.equal(got, choice_native.choose(q, found, torch.full_like(candidates, nearest), width))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other pages": ({"low": torch.zeros(2, 3, 36, 5)}, "low must be [2, 3, 37, 5], got [2, 3, 36, 5]"),
    "another dtype": ({"high": torch.zeros(2, 3, 37, 5).double()}, "high must be float32, got float64"),
    "candidates of int32": ({"candidates": torch.zeros(2, 19).int()}, "candidates must be int64, got int32"),
    "other queries": ({"candidates": torch.zeros(2, 18).long()}, "candidates must be [2 or 1, 19], got [2, 18]"),
    "wider than all": ({"width": 38}, "width must lie between 1 and 37, got 38"),
    "none": ({"width": 0}, "width must lie between 1 and 37, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_operator_refuses(name: str) -> None:
    q, found, candidates, width = problem("odd sizes")
    change, words = WRONG[name]
    given = {"q": q, **found._asdict(), "candidates": candidates, "width": width} | change
    with pytest.raises(errors.SubquadError) as caught:
        torch.ops.subquad.choose_pages(*given.values())
    assert str(caught.value) == f"choose_pages: {words}"


@native
def test_the_gate_refuses() -> None:
    sizes = {"rows": 2, "lines": 6, "groups": 2, "length": 19, "pages": 37, "head_dim": 5, "width": 4}
    shapes = {"q": (6, 2, 19, 5), "high": (6, 37, 5), "low": (6, 37, 5)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {"candidates": torch.zeros(2, 19).long(), "chosen": torch.zeros(6, 2, 19, 4).long()}
    assert choice_plan(**sizes).problem(1, **tensors).width == 4
    for name in tensors:
        with pytest.raises(errors.SubquadError, match=f"^cpu engine: {name} "):
            choice_plan(**sizes).problem(1, **tensors | {name: tensors[name][:, 1:]})
        with pytest.raises(errors.SubquadError, match=f"^cpu engine: .*{name}"):
            choice_plan(**sizes).problem(1, **{other: x for other, x in tensors.items() if other != name})
    for change in ({"width": 38}, {"width": 0}, {"lines": 7}, {"pages": 0}, {"head_dim": 2**26}):
        with pytest.raises(errors.SubquadError, match=r"^cpu engine: "):
            choice_plan(**sizes | change)
