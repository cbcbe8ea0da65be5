"""Sparse attention in C++ against the torch engine in float64: problems as mechanisms have them, and others."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from subquad import ClusterAttention, LshAttention, PagesAttention, StridedAttention, WindowAttention, errors
from subquad.kernels import engines
from subquad.kernels.cpu import library
from subquad.kernels.sparse import native
from subquad.kernels.sparse import torch as reference
from subquad.kernels.sparse.torch import UNLIMITED, Bounds, Inputs, Pairs
from subquad.testing import assert_close
from threads import threads

pytestmark = pytest.mark.skipif(not library.AVAILABLE, reason=library.WHY_MISSING)


@dataclass(frozen=True)
class Sizes:
    tiles: int
    rows: int
    blocks: int
    keys: int
    met: int
    dim: int = 8
    value_dim: int = 8
    rounds: int = 0


CASES: dict[str, tuple[Sizes, Bounds]] = {
    "one of all": (Sizes(1, 1, 1, 1, 1, 1, 1), Bounds()),
    "odd sizes": (Sizes(5, 7, 6, 5, 3, 4, 3), Bounds()),
    "a band": (Sizes(40, 49, 50, 49, 2, 32, 32), Bounds(1, 30)),
    "whole vectors": (Sizes(9, 64, 12, 32, 4, 64, 32), Bounds(0)),
    "several panels of rows": (Sizes(9, 130, 12, 33, 4, 20, 17), Bounds(0, 20, skip_self=True)),
    "keys in several chunks": (Sizes(3, 70, 30, 64, 30, 16, 40), Bounds(-5, 25)),
    "one place": (Sizes(4, 20, 5, 16, 3), Bounds(3, 3)),
    "rounds": (Sizes(6, 40, 9, 20, 4, rounds=3), Bounds(1, code_low=0, code_high=1, round=2, skip_self=True)),
    "an early round": (Sizes(6, 40, 9, 20, 4, rounds=2), Bounds(code_low=-1, code_high=1, round=0)),
    "one row": (Sizes(40, 1, 50, 16, 5, 64, 64), Bounds(0)),
    "one row of odd sizes": (Sizes(9, 1, 7, 5, 3, 37, 19), Bounds(-10, 20, skip_self=True)),
    "one row in rounds": (Sizes(30, 1, 9, 20, 4, 80, 8, rounds=2), Bounds(1, code_low=0, code_high=1, round=1)),
    "one row that sees nothing": (Sizes(3, 1, 4, 8, 2), Bounds(UNLIMITED - 1)),
    "nothing is seen": (Sizes(3, 9, 4, 8, 2), Bounds(UNLIMITED - 1)),
}


def problem(sizes: Sizes, alike: bool) -> tuple[Inputs, Pairs, tuple[Tensor, Tensor]]:
    """Every row of a tile meets other blocks, some of them none; some keys are not there."""
    s, generator = sizes, torch.Generator().manual_seed(0)

    def labels(*shape: int, most: int = 40) -> Tensor:
        return torch.randint(most, shape, generator=generator, dtype=torch.int32)

    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((s.tiles, s.rows, s.dim), (s.blocks, s.keys, s.dim), (s.blocks, s.keys, s.value_dim))
    )
    met = torch.stack([torch.randperm(s.blocks + 1, generator=generator)[: s.met].sort().values for _ in q])
    if alike:
        alive = torch.rand(s.blocks, s.keys, generator=generator) > 0.2
        pairs = Pairs(met, labels(s.rows), labels(s.met * s.keys), alive=alive)
    else:
        codes = (labels(*shape, s.rounds, most=3) for shape in ((s.tiles, s.rows), (s.blocks, s.keys)))
        q_code, k_code = codes if s.rounds else (None, None)
        pairs = Pairs(met, labels(s.tiles, s.rows), labels(s.blocks, s.keys), q_code, k_code)
    grads = (
        torch.randn(s.tiles, s.rows, s.value_dim, generator=generator),
        torch.randn(s.tiles, s.rows, generator=generator).double(),
    )
    return Inputs(q, k, v + 1), pairs, grads


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("alike", [False, True], ids=["labels of their own", "alike"])
@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_torch_engine_computes(name: str, alike: bool, count: int) -> None:
    sizes, bounds = CASES[name]
    if alike:
        sizes, bounds = replace(sizes, rounds=0), bounds._replace(round=0)
    inputs, pairs, grads = problem(sizes, alike)
    exact = Inputs(*(x.double() for x in inputs))
    want, want_log = reference.forward(exact, pairs, bounds, 0.3)
    want_grads = reference.backward(exact, pairs, bounds, 0.3, want, want_log, (grads[0].double(), grads[1]))
    without = grads[1] - (grads[0].double() * want).sum(-1)
    with threads(count):
        out, log_normaliser = native.forward(inputs, pairs, bounds, 0.3)
        got = native.backward(inputs, pairs, bounds, 0.3, out, log_normaliser, grads)
        alone = native.backward(inputs, pairs, bounds, 0.3, None, log_normaliser, (grads[0], without))
    sees = want_log.isfinite()
    assert torch.equal(sees, log_normaliser != -torch.inf)
    assert not bool(out[~sees].any())
    assert_close(out, want, 1e-6, "output")
    assert_close(log_normaliser[sees], want_log[sees], 1e-6, "log-normaliser")
    for found in (got, alone):
        for which, g, w in zip("qkv", found, want_grads, strict=True):
            assert_close(g, w, 1e-6, f"d{which}")


def test_tiles_may_share_all_blocks_or_none() -> None:
    """Gradients of keys are sums over tiles that other threads do; and blocks that no tile meets get zeros."""
    inputs, pairs, grads = problem(Sizes(30, 16, 8, 16, 4), alike=False)
    for met in (pairs.blocks % 4, torch.full_like(pairs.blocks, 8), pairs.blocks[:, :1].expand(-1, 4)):
        now = pairs._replace(blocks=met)
        out, log_normaliser = native.forward(inputs, now, Bounds(), 0.3)
        exact = Inputs(*(x.double() for x in inputs))
        want, want_log = reference.forward(exact, now, Bounds(), 0.3)
        wants = reference.backward(exact, now, Bounds(), 0.3, want, want_log, (grads[0].double(), grads[1]))
        found = []
        for count in (1, 3, 3, 8):
            with threads(count):
                found.append(native.backward(inputs, now, Bounds(), 0.3, out, log_normaliser, grads))
            for g, w in zip(found[-1], wants, strict=True):
                assert_close(g, w, 1e-6)
        assert all(map(torch.equal, found[1], found[2])), "for a number of threads they are the same bits every time"


rows_of_a_tile = pytest.mark.parametrize("rows", [20, 1])


@rows_of_a_tile
def test_large_logits_keep_their_digits(rows: int) -> None:
    """Beside a log-normaliser of 1e4 a float32 has none left; these logits are exact, and differ by little."""
    inputs, pairs, grads = problem(Sizes(4, rows, 5, 16, 3), alike=False)
    q, k = ((8 * x).round() / 8 for x in (inputs.q, inputs.k))
    q[..., 0] = k[..., 0] = 100
    inputs = inputs._replace(q=q, k=k)
    exact = Inputs(*(x.double() for x in inputs))
    want, want_log = reference.forward(exact, pairs, Bounds(), 1.0)
    assert want_log[want_log.isfinite()].min() > 9000
    out, log_normaliser = native.forward(inputs, pairs, Bounds(), 1.0)
    assert_close(out, want, 1e-6, "output")
    wants = reference.backward(exact, pairs, Bounds(), 1.0, want, want_log, (grads[0].double(), grads[1]))
    got = native.backward(inputs, pairs, Bounds(), 1.0, out, log_normaliser, grads)
    assert_close(got.v, wants.v, 1e-6, "dv")


@rows_of_a_tile
@pytest.mark.parametrize("size", [1e19, 2e38])
def test_hidden_keys_may_hold_anything_finite(size: float, rows: int) -> None:
    inputs, pairs, grads = problem(Sizes(4, rows, 5, 16, 3), alike=False)
    hidden = pairs.k_place > 20
    huge = inputs._replace(
        k=inputs.k.masked_fill(hidden[..., None], size), v=inputs.v.masked_fill(hidden[..., None], size)
    )
    pairs = pairs._replace(q_place=pairs.q_place % 20)
    found = []
    for given in (inputs, huge):
        out, log_normaliser = native.forward(given, pairs, Bounds(0), 0.3)
        back = native.backward(given, pairs, Bounds(0), 0.3, out, log_normaliser, grads)
        found.append([out, log_normaliser, back.q, back.k[~hidden], back.v[~hidden]])
    assert all(map(torch.equal, *found))


def test_nan_reaches_rows_that_see_it() -> None:
    """And no others, if it is in a key."""
    inputs, pairs, _ = problem(Sizes(1, 4, 1, 4, 1), alike=False)
    places = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    pairs = Pairs(torch.zeros(1, 1, dtype=torch.int64), places, places)
    for which, reached in (("k", [False, False, True, True]), ("v", [True] * 4)):
        spoiled = getattr(inputs, which).clone()
        spoiled[0, 2] = torch.nan
        given = inputs._replace(**{which: spoiled})
        for engine in (native, reference):
            out, _ = engine.forward(given, pairs, Bounds(0), 0.3)
            assert out.isnan().all(-1).tolist() == [reached]


def test_nan_and_large_keys_reach_a_row_of_its_own() -> None:
    inputs, pairs, grads = problem(Sizes(3, 1, 4, 8, 2), alike=True)
    pairs = Pairs(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(1).int(), torch.zeros(8).int())
    spoiled = inputs.k.clone()
    spoiled[0, 3] = torch.nan
    assert bool(native.forward(inputs._replace(k=spoiled), pairs, Bounds(), 0.3)[0].isnan().all())
    large = inputs._replace(k=1e30 * inputs.k)  # logits are kept within what float32 holds
    found = []
    for engine in (native, reference):
        out, log_normaliser = engine.forward(large, pairs, Bounds(), 0.3)
        back = engine.backward(large, pairs, Bounds(), 0.3, out, log_normaliser, grads)
        found.append([out, back.v])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-6)


@rows_of_a_tile
def test_normalisers_beyond_float32_leave_no_weight(rows: int) -> None:
    """Those of tokens with themselves, which buckets add in float64, may be larger than any logit of a tile."""
    inputs, pairs, grads = problem(Sizes(3, rows, 4, 8, 2), alike=False)
    out, log_normaliser = native.forward(inputs, pairs, Bounds(), 0.3)
    for size in (1e39, -1e39, torch.inf):
        log_normaliser[0, -1] = size
        exact = Inputs(*(x.double() for x in inputs))
        without = log_normaliser.masked_fill(log_normaliser.abs() > 1e38, torch.inf)
        want = reference.backward(exact, pairs, Bounds(), 0.3, out.double(), without, (grads[0].double(), grads[1]))
        got = native.backward(inputs, pairs, Bounds(), 0.3, out, log_normaliser, grads)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, 1e-6)


def test_rounds_beyond_those_that_there_are() -> None:
    inputs, pairs, _ = problem(Sizes(6, 40, 9, 20, 4, rounds=2), alike=False)
    exact = Inputs(*(x.double() for x in inputs))
    for number in (2, 5, 2**31 - 1):
        bounds = Bounds(code_low=0, code_high=1, round=number)
        want, _ = reference.forward(exact, pairs, bounds, 0.3)
        assert_close(native.forward(inputs, pairs, bounds, 0.3)[0], want, 1e-6)


MECHANISMS = {
    "window": WindowAttention(8, window=20, global_tokens=2),
    "strided": StridedAttention(8, stride=7),
    "lsh": LshAttention(8, num_buckets=4, bucket_size=8, rounds=2),
    "pages": PagesAttention(8, 2, page=4, window=8),
    "cluster": ClusterAttention(8, num_clusters=4, bucket_size=8, num_heads=2),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms_run_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(native, "forward", lambda *args, run=native.forward: called.append("forward") or run(*args))
    monkeypatch.setattr(native, "backward", lambda *args, run=native.backward: called.append("backward") or run(*args))
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    MECHANISMS[name](q.requires_grad_(), k, v, causal=True).sum().backward()
    assert {"forward", "backward"} == set(called)
    called.clear()
    MECHANISMS[name].double()(q.double(), k.double(), v.double(), causal=True)
    assert not called
    MECHANISMS[name].float()


def test_without_a_library_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.choose_sparse(torch.zeros(1)) is native
    monkeypatch.setitem(engines.ENGINES, "cpu", replace(engines.ENGINES["cpu"], missing="it was not built"))
    assert engines.choose_sparse(torch.zeros(1)) is reference
    assert engines.choose_sparse(torch.zeros(1, device="meta")) is reference


WRONG = {
    "other keys": lambda i, p: (i._replace(k=i.k[:, 1:]), p),
    "keys of another dtype": lambda i, p: (i._replace(k=i.k.double()), p),
    "other places": lambda i, p: (i, p._replace(q_place=p.q_place[:, 1:])),
    "places of int64": lambda i, p: (i, p._replace(k_place=p.k_place.long())),
    "codes of another number of rounds": lambda i, p: (i, p._replace(k_code=p.k_code[..., 1:])),
    "codes of queries alone": lambda i, p: (i, p._replace(k_code=None)),
    "blocks of int32": lambda i, p: (i, p._replace(blocks=p.blocks.int())),
    "other tiles": lambda i, p: (i, p._replace(blocks=p.blocks[1:])),
    "keys that are not there": lambda i, p: (i, p._replace(alive=torch.ones(9, 10, dtype=torch.bool))),
    "tensors of another device": lambda i, p: (i._replace(v=i.v.to("meta")), p),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tensors_do_not_pass_the_gate(wrong: str) -> None:
    inputs, pairs, _ = problem(Sizes(6, 12, 9, 10, 4, rounds=2), alike=False)
    with pytest.raises(errors.SubquadError, match="cpu engine"):
        native.forward(*WRONG[wrong](inputs, pairs), Bounds(), 0.3)


def test_numbers_of_blocks_that_there_are_not_are_passed_over() -> None:
    """The operator refuses them in words; behind it nothing is read that is not there."""
    inputs, pairs, grads = problem(Sizes(6, 12, 9, 10, 4), alike=False)
    for number, other in itertools.product((-1, -(2**40)), (10, 2**40)):
        met = pairs.blocks.clone()
        met[0, 0], met[1, 1] = number, other
        padded = torch.where((met < 0) | (met > 9), 9, met)
        results = []
        for blocks in (met, padded):
            given = pairs._replace(blocks=blocks)
            out, log_normaliser = native.forward(inputs, given, Bounds(), 0.3)
            results.append([out, *native.backward(inputs, given, Bounds(), 0.3, out, log_normaliser, grads)])
        for got, want in zip(*results, strict=True):
            assert_close(got, want, 1e-6)  # tiles are sorted by these numbers, so sums may have another order
