"""The width of FAVOR's exact part, apart from its blocks (`reach`), and the exact part alone (`far=False`)."""

from typing import Any

import pytest
import torch

from fitted import fitted
from subquad import FavorAttention
from subquad.calibration import calibrate
from subquad.checks.calibration import all_exact
from subquad.errors import ConfigError, ShapeError
from subquad.functional import favor_attention
from subquad.kernels.engines import ENGINES, Engine
from subquad.kernels.favor import torch as favor_torch
from subquad.kernels.favor.logs import LogFeatures
from subquad.testing import assert_close, make_inputs
from subquad.testing.inputs import gradients

LEARNED = {"estimator": "hedgehog", "num_heads": 2}


@pytest.mark.parametrize(("near", "reach", "sinks"), [(1, 3, 0), (4, 2, 5), (3, 5, 1), (4, 1, 2)])
def test_the_pairs_that_are_exact(near: int, reach: int, sinks: int) -> None:
    """As the documentation says it, pair by pair."""
    attention = FavorAttention(4, 4, near=near, reach=reach, sinks=sinks)
    places = torch.arange(30)[None]
    exact = attention.exact_pairs(places, places)[0, 0]
    for t in range(30):
        for j in range(30):
            assert bool(exact[t, j]) == (abs(t // near - j // near) <= reach or j < sinks)
    for causal in (False, True):
        far = ~exact.tril().logical_or(~torch.ones_like(exact).tril()) if causal else ~exact
        for length in range(1, 31):
            assert bool(far[:length, :length].any()) == (length > all_exact(attention.options, causal))


def test_small_blocks_waste_little() -> None:
    """W + near tokens are kept, of which W + near / 2 are seen on average."""
    attention = FavorAttention(4, 4, near=16, reach=8, sinks=0)
    _, state = attention.extend(*make_inputs(attention, 400))
    kept = state.block_k.shape[2]
    places = torch.arange(320)[None]
    seen = attention.exact_pairs(places, places)[0, 0].tril()[160:].sum(-1).float().mean()
    assert kept == 144
    assert float(seen) == 128 + 8.5
    assert float(seen) / kept > 0.93


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("options", [{"near": 4, "reach": 3, "sinks": 2}, {"near": 5, "reach": 2, "sinks": 0}])
def test_gradients_of_the_map(options: dict[str, Any], causal: bool) -> None:
    """Of all its tensors, offsets included, against the dense definition; with padding."""
    attention = fitted(FavorAttention, 6, 16, backend="torch", **LEARNED, **options).double()
    inputs = make_inputs(attention, 50).leaves()
    mask = torch.rand(2, 50, generator=torch.Generator().manual_seed(0)) < 0.8
    grad = torch.randn(2, 4, 50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = dict(attention.named_parameters())
    assert any("offset" in name for name in parameters)
    found = []
    for run in (attention.forward, attention.reference):
        out = run(*inputs, causal=causal, key_mask=mask) * mask[:, None, :, None]
        found.append(torch.autograd.grad(out, (*inputs, *parameters.values()), grad))
    for name, got, want in zip(("q", "k", "v", *parameters), *found, strict=True):
        assert want.norm() > 0
        assert_close(got, want, 1e-10, name)


# Without a far field --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"near": 4, "reach": 2, "sinks": 2}, {"near": 0, "sinks": 3}])
def test_without_a_far_field_no_feature_is_computed(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = FavorAttention(6, 16, far=False, backend="torch", **options)
    inputs = make_inputs(attention, 40)
    want = attention(*inputs, causal=True)

    def fail(*_: Any) -> Any:
        raise AssertionError("features")

    for name in ("of_queries", "of_keys", "queries_backward", "keys_backward"):
        monkeypatch.setattr(LogFeatures, name, fail)
    leaves = inputs.leaves()
    out = attention(*leaves, causal=True)
    gradients(out, leaves)
    assert torch.equal(out, want)
    state, outs = None, []
    for start, stop in ((0, 17), (17, 18), (18, 19), (19, 40)):
        out, state = attention.extend(*inputs.tokens(start, stop), state)
        outs.append(out)
    assert_close(torch.cat(outs, 2), want, 1e-12)
    assert state is not None
    assert state.far_sum.shape == (2, 2, 0, 6)
    assert {t.shape[0] for t in state} == {2}


def test_it_is_the_softmax_over_the_window() -> None:
    attention = FavorAttention(6, 16, near=3, reach=2, sinks=1, far=False)
    q, k, v = torch.randn(3, 1, 1, 20, 6, dtype=torch.float64)
    t, j = torch.arange(20)[:, None], torch.arange(20)
    seen = (j <= t) & ((t // 3 - j // 3 <= 2) | (j < 1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert_close(attention(q, k, v, causal=True), want, 1e-12)
    options = {"near": 3, "reach": 2, "sinks": 1, "far": False, "causal": True}
    assert_close(favor_attention(q, k, v, attention.feature_map, **options), want, 1e-12)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_trained_layer_without_its_far_field(backend: str) -> None:
    """Its features stay, do not matter, and get zeros for gradients."""
    attention = fitted(FavorAttention, 6, 16, near=4, sinks=1, backend=backend, **LEARNED)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    inputs = make_inputs(attention, 40).to(torch.float32)
    whole = attention(*inputs, causal=True)
    _, whole_state = attention.extend(*inputs.tokens(0, 30))
    attention.far = False
    assert not attention.far
    alone = attention(*inputs, causal=True)
    assert not torch.allclose(alone, whole, atol=1e-3)
    got = torch.autograd.grad(alone.sum(), list(attention.parameters()))
    assert all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(got, attention.parameters(), strict=True))
    with pytest.raises(ShapeError, match=r"state\.far_max must be"):
        attention.extend(*inputs.tokens(30, 40), whole_state)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 3
    assert torch.equal(attention(*inputs, causal=True), alone)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter -= 3
    attention.far = True
    assert_close(attention(*inputs, causal=True), whole, 1e-4)
    assert attention.state_dict().keys() == before.keys()


# What is refused ------------------------------------------------------------------------------------------------------

NOTHING_EXACT = (
    "favor: far=False attends to near blocks and sinks alone, and with near=0, sinks=0 there are none; "
    "use near > 0 or sinks > 0"
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"near": 0, "reach": 3}, "favor: reach counts near blocks, and near=0 has none; use reach=1, got reach=3"),
        ({"reach": 0}, "favor: reach must be a whole number of at least 1, got 0"),
        ({"reach": 1.5}, "favor: reach must be a whole number of at least 1, got 1.5"),
        ({"far": 0}, "favor: far must be True or False, got 0"),
        ({"far": False, "near": 0, "sinks": 0}, NOTHING_EXACT),
        ({"far": False, "near": 0, "sinks": 0, "estimator": "trigonometric"}, NOTHING_EXACT),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FavorAttention(6, 16, **options)
    assert str(caught.value) == words


def test_a_layer_that_has_nothing_but_its_far_field() -> None:
    attention = FavorAttention(6, 16, near=0, sinks=0)
    with pytest.raises(ConfigError) as caught:
        attention.far = False
    assert str(caught.value) == NOTHING_EXACT
    assert attention.far


def test_a_far_field_that_is_off_cannot_be_calibrated() -> None:
    attention = FavorAttention(6, 16, near=4, far=False)
    with pytest.raises(ConfigError) as caught:
        calibrate(attention, [tuple(torch.randn(3, 2, 2, 40, 6))] * 2)
    words = "calibrate: far=False has no far field, and features that nothing reads; set far = True first"
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"near": 4, "reach": 2}, "it has no reach beyond the neighbouring blocks"),
        ({"near": 4, "far": False}, "it has no attention without a far field (far=False)"),
    ],
)
def test_an_engine_that_cannot_says_so(options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("stub", {"favor": favor_torch}, reach=False, without_far=False)
    monkeypatch.setitem(ENGINES, "stub", engine)
    attention = FavorAttention(6, 16, backend="stub", **options)
    inputs = make_inputs(attention, 30)
    words = f"favor: backend='stub' cannot be used: {reason}; backend='auto' falls back to torch"
    for call in (lambda: attention(*inputs), lambda: attention.extend(*inputs.tokens(0, 1))):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == words
