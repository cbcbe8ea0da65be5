"""Decoding one token, where the C++ engine's gate checks alone what `extend` checks otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.errors import SubquadError
from subquad.kernels.cpu import library
from subquad.mechanisms import favor_state, linear

pytestmark = pytest.mark.skipif(not library.AVAILABLE, reason=library.WHY_MISSING)

MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "favor": lambda: FavorAttention(8, 16, near=4, sinks=2),
    "favor, near=0": lambda: FavorAttention(8, 16, near=0, sinks=0),
    "favor, a map per head": lambda: FavorAttention(8, 16, near=4, num_heads=2),
    "favor, learned": lambda: FavorAttention(8, 16, near=4, estimator="hedgehog"),
    "linear": lambda: LinearAttention(8),
    "linear, projected": lambda: LinearAttention(8, feature_map="relu", num_features=16),
}
Call = tuple[Tensor, Tensor, Tensor, Any]


def one_token(mechanism: Mechanism, dtype: torch.dtype = torch.float32) -> Call:
    """q, k, v of the 12th token of two sequences, and the state before it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, dim, generator=generator) for heads, dim in ((4, 8), (2, 8), (2, 5)))
    q, k, v = (t.to(dtype) for t in (q, k, v))
    with torch.no_grad():
        _, state = mechanism.extend(q[:, :, :11], k[:, :, :11], v[:, :, :11])
    state = type(state)(*(t.contiguous() for t in state))  # as one more token would leave it
    return q[:, :, 11:], k[:, :, 11:], v[:, :, 11:], state


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (favor_state, linear):
        monkeypatch.setattr(module, "takes_plain_step", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_it_is_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = MECHANISMS[name]()
    call = one_token(mechanism, dtype)
    with torch.no_grad():
        with pytest.MonkeyPatch.context() as taken:  # the checks are not run, so it is taken
            taken.setattr(Mechanism, "check_extend", None)
            out, state = mechanism.extend(*call)
        the_long_way(monkeypatch)
        want, want_state = mechanism.extend(*call)
    assert out.dtype == want.dtype == dtype
    assert torch.equal(out, want)
    assert type(state) is type(want_state)
    assert all(map(torch.equal, state, want_state))


def narrow(t: Tensor) -> Tensor:
    return t[..., :-1]


WRONG: dict[str, Callable[[Call], Call]] = {
    "two keys": lambda c: (c[0], *(torch.cat([t, t], 2) for t in c[1:3]), c[3]),
    "two queries": lambda c: (torch.cat([c[0], c[0]], 2), *c[1:]),
    "another batch": lambda c: (c[0][:1], *c[1:]),
    "other heads": lambda c: (c[0][:, :3], *c[1:]),
    "no key heads": lambda c: (c[0], c[1][:, :0], c[2][:, :0], c[3]),
    "a head dim": lambda c: (narrow(c[0]), narrow(c[1]), c[2], c[3]),
    "a value dim": lambda c: (c[0], c[1], narrow(c[2]), c[3]),
    "a dtype": lambda c: (c[0], c[1].double(), c[2], c[3]),
    "no tensor": lambda c: (c[0], c[1], c[2].tolist(), c[3]),  # pyright: ignore
    "three dims": lambda c: (c[0][0], *c[1:]),
    "a sparse query": lambda c: (c[0].to_sparse(), *c[1:]),
    "a tuple": lambda c: (*c[:3], tuple(c[3])),
    "one field": lambda c: (*c[:3], tuple.__new__(type(c[3]), c[3][:1])),
    "a field more": lambda c: (*c[:3], tuple.__new__(type(c[3]), (*c[3], c[0]))),
    "wider sums": lambda c: (*c[:3], c[3]._replace(far_sum=torch.cat([c[3].far_sum] * 2, 2))),
    "a number for sums": lambda c: (*c[:3], c[3]._replace(far_sum=torch.tensor(1.0))),
    "a number for all": lambda c: (*c[:3], type(c[3])(*(torch.tensor(1.0) for _ in c[3]))),
    "sums of int": lambda c: (*c[:3], c[3]._replace(far_low=c[3].far_low.int())),
    "other maxima": lambda c: (*c[:3], c[3]._replace(far_max=c[3].far_max[:, :1])),
    "maxima of int": lambda c: (*c[:3], c[3]._replace(far_max=c[3].far_max.int())),
    "no maxima": lambda c: (*c[:3], c[3]._replace(far_max=None)),
}
WRONG_POSITIONS: dict[str, Callable[[Call], Call]] = {
    "negative": lambda c: (*c[:3], c[3]._replace(length=c[3].length - 12)),
    "int32": lambda c: (*c[:3], c[3]._replace(length=c[3].length.int())),
    "a sink more": lambda c: (*c[:3], c[3]._replace(sink_k=torch.cat([c[3].sink_k, c[1]], 2))),
    "other blocks": lambda c: (*c[:3], c[3]._replace(block_v=c[3].block_v[:, :, 1:])),
}


def error_of(mechanism: Mechanism, call: Call) -> str:
    with torch.no_grad(), pytest.raises(SubquadError) as caught:
        mechanism.extend(*call)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, wrong) for name in ("favor", "favor, near=0", "linear", "linear, projected") for wrong in WRONG),
        *(("favor", wrong) for wrong in WRONG_POSITIONS),
    ],
)
def test_errors_are_the_same(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = MECHANISMS[name]()
    call = (WRONG | WRONG_POSITIONS)[wrong](one_token(mechanism))
    found = error_of(mechanism, call)
    assert not found.startswith("cpu engine")
    the_long_way(monkeypatch)
    assert found == error_of(mechanism, call)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated:DeprecationWarning")  # torch's own forward mode
@pytest.mark.parametrize("name", ["favor", "linear"])
def test_derivatives_go_the_long_way(name: str) -> None:
    mechanism = MECHANISMS[name]()
    q, k, v, state = one_token(mechanism)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(SubquadError, match="forward-mode derivatives"):
        mechanism.extend(forward_ad.make_dual(q, q), k, v, state)
    with torch.no_grad(), pytest.raises(SubquadError, match=r"torch\.func transforms"):
        torch.func.vmap(lambda x: mechanism.extend(x, k, v, state)[0])(q[None])
    (dq,) = torch.autograd.grad(mechanism.extend(q.requires_grad_(), k, v, state)[0].sum(), q)
    assert bool(dq.isfinite().all())
    assert bool(dq.any())


@pytest.mark.parametrize("name", MECHANISMS)
def test_states_that_are_not_dense_are_made_so(name: str) -> None:
    """The gate refuses them, the long way copies them, and the next token is a plain step again."""
    mechanism = MECHANISMS[name]()
    q, k, v, state = one_token(mechanism)
    loose = type(state)(*(torch.stack([t, t], -1)[..., 0] for t in state))
    with torch.no_grad():
        want = mechanism.extend(q, k, v, state)
        q, k, v = (torch.stack([t, t], -1)[..., 0] for t in (q, k, v))
        got = mechanism.extend(q, k, v, loose)
    assert torch.equal(got[0], want[0])
    assert all(map(torch.equal, got[1], want[1]))
    assert all(t.is_contiguous() for t in got[1])


@pytest.mark.parametrize("name", ["linear", "linear, projected", "favor"])
def test_states_of_other_dims_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them fit each other, but not the mechanism."""
    mechanism = MECHANISMS[name]()
    q, k, v, _ = one_token(mechanism)
    other = FavorAttention(7, 16, near=4, sinks=2) if name == "favor" else LinearAttention(7)
    with torch.no_grad():
        _, state = other.extend(narrow(q), narrow(k), v)
    call = narrow(q), narrow(k), v, state
    found = error_of(mechanism, call)
    the_long_way(monkeypatch)
    assert found == error_of(mechanism, call)


def test_learned_maps_in_half_precision_are_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = FavorAttention(8, 16, near=4, estimator="hedgehog").bfloat16()
    call = one_token(mechanism, torch.bfloat16)
    with torch.no_grad():
        want, _ = mechanism.extend(*call)
        monkeypatch.setattr(Mechanism, "check_extend", None)
        assert torch.equal(mechanism.extend(*call)[0], want)


def test_sequences_have_positions_of_their_own() -> None:
    """One ends a block and the other is amid one, or among the sinks; what the caller has stays as it is."""
    mechanism = FavorAttention(8, 16, near=4, sinks=2)
    q, k, v, state = one_token(mechanism)
    with torch.no_grad():
        for lengths in ([11, 9], [9, 11], [1, 9], [9, 1]):
            mixed = type(state)(*(t.clone() for t in state._replace(length=torch.tensor(lengths))))
            before = [t.clone() for t in mixed]
            out, after = mechanism.extend(q, k, v, mixed)
            assert all(map(torch.equal, mixed, before))
            for i in (0, 1):
                one = slice(i, i + 1)
                want, alone = mechanism.extend(q[one], k[one], v[one], type(state)(*(t[one] for t in mixed)))
                assert torch.equal(out[one], want)
                assert all(torch.equal(a[one], b) for a, b in zip(after, alone, strict=True))


def test_empty_tensors_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ would read nothing of them, but what it fills was made after their pattern."""
    mechanism = FavorAttention(8, 16, near=4, sinks=0, far=False)
    q, k, v, state = one_token(mechanism)
    for name in ("far_max", "far_sum", "far_low", "sink_k", "sink_v"):
        assert not getattr(state, name).numel()
        call = (q, k, v, state._replace(**{name: getattr(state, name).to("meta")}))
        with torch.no_grad():
            found = error_of(mechanism, call)
            with monkeypatch.context() as patch:
                the_long_way(patch)
                assert found == error_of(mechanism, call)
