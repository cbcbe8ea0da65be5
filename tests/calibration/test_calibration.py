"""`subquad.calibrate`: layers alone and in models, drawn and learned features, what it refuses."""

import copy
import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from fitted import brief
from subquad import FavorAttention
from subquad.calibration import CalibrationReport, LayerReport, training
from subquad.calibration.fitting import DRAWS, split
from subquad.calibration.training import _far_mass, start_features, train_features
from subquad.errors import CalibrationError, UncalibratedWarning
from subquad.features import Proposal
from subquad.features.draws import derived_seed
from subquad.features.learned import SHARPNESS, HedgehogFeatures
from subquad.features.positive import draw_rows
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.recording.calls import Call
from subquad.recording.fidelity import ExactOutputs
from subquad.recording.pairs import far_pairs
from subquad.recording.record import Recording
from subquad.testing import assert_close

D, LENGTH = 16, 96


def stretched(seed: int, heads: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys off the origin that vary in few directions, as those of trained heads do."""
    generator = torch.Generator().manual_seed(seed)
    shape = torch.linspace(2.0, 0.0, D).square()
    offset = torch.randn(heads, 1, D, generator=torch.Generator().manual_seed(99))
    q, k = (shape * torch.randn(2, heads, length, D, generator=generator) + sign * offset for sign in (1, -0.5))
    return q, k, torch.randn(2, heads, length, D, generator=generator) + k


def batches(count: int = 3, **options: Any) -> list[dict[str, Any]]:
    return [dict(zip("qkv", stretched(seed, **options), strict=True)) for seed in range(count)]


def layer(near: int = 0, **options: Any) -> FavorAttention:
    return FavorAttention(D, 64, near=near, sinks=2 if near else 0, num_heads=2, **options)


@pytest.mark.parametrize("near", [0, 8])
@pytest.mark.parametrize("estimator", ["calibrated", "sharp", "hedgehog", "exponential"])
def test_features_get_better_on_batches_that_were_held_out(estimator: str, near: int) -> None:
    attention = layer(near)
    report = subquad.calibrate(attention, batches(), progress=False, **brief(estimator, 40))
    assert report.held_out
    assert report.mean_after < 0.85 * report.mean_before, str(report)
    assert attention.estimator == estimator
    (held,) = Recording(attention, batches()[-1:], op="test", exact=True)
    errors = ExactOutputs(held.calls).errors(attention)
    assert_close(errors, torch.tensor(report.layers[0].after).double(), 1e-6, "reported errors")


def test_the_error_is_that_of_the_outputs() -> None:
    attention = layer(8)
    q, k, v = stretched(0)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [40]])
    got = ExactOutputs([Call(q, k, v, True, real, attention.options.scale)]).errors(attention)
    exact = subquad.SoftmaxAttention(D).double()(*(t.double() for t in (q, k, v)), causal=True, key_mask=real)
    out = attention(q, k, v, causal=True, key_mask=real).double()
    for head in range(2):
        kept = [torch.cat([t[0, head], t[1, head, :40]]) for t in (out, exact)]
        assert abs(got[head].item() - ((kept[0] - kept[1]).norm() / kept[1].norm()).item()) < 1e-5


def test_same_seed_same_features() -> None:
    made = []
    for seed in (0, 0, 1):
        attention = layer()
        subquad.calibrate(attention, batches(), seed=seed)
        made.append(attention.feature_map.query)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_redraw_keeps_what_was_found() -> None:
    attention = layer()
    subquad.calibrate(attention, batches())
    before = {name: x.clone() for name, x in attention.features.named_buffers()}
    attention.redraw(5)
    after = dict(attention.features.named_buffers())
    assert torch.equal(after["mean"], before["mean"])
    assert torch.equal(after["root"], before["root"])
    assert not torch.equal(after["weight"], before["weight"])
    proposal = Proposal(before["mean"], before["root"])
    drawn = draw_rows(D, 64, coupling="orthogonal", num_heads=2, seed=5, proposal=proposal)
    assert torch.equal(after["weight"], drawn.weight)
    assert torch.equal(after["log_weight"], drawn.log_weight)


def test_a_transform_leaves_exact_attention_alone() -> None:
    attention = layer(2 * LENGTH)
    far = layer(0)
    subquad.calibrate(far, batches(), transform=True)
    attention.adopt_features(far)
    q, k, v = (t.double() for t in stretched(7))
    exact = subquad.SoftmaxAttention(D)(q, k, v)
    assert_close(attention(q, k, v), exact, 1e-6, "all near; T and its inverse are float32")


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_calibration_balances_queries_and_keys_where_it_can(kernel: str) -> None:
    attention = layer(kernel=kernel)
    report = subquad.calibrate(attention, batches())
    assert attention.transform == (kernel == "softmax")
    assert report.mean_after < report.mean_before
    subquad.calibrate(attention, batches(), transform=False)
    assert not attention.transform


def test_enough_features_are_found_by_measuring() -> None:
    easy = [{"q": 0.2 * b["q"], "k": 0.2 * b["k"], "v": b["v"]} for b in batches()]
    attention = layer()
    report = subquad.calibrate(attention, easy, num_features="auto", target=0.3)
    assert report.layers[0].num_features == attention.num_features == attention.feature_map.num_features < 256
    assert report.mean_after <= 0.3 / 1.7
    stricter = layer()
    subquad.calibrate(stricter, easy, num_features="auto", target=0.1)
    assert stricter.num_features > attention.num_features


def test_the_draws_that_decide_on_the_number_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    redraw, seeds = FavorAttention.redraw, []

    def recorded(attention: FavorAttention, seed: int) -> None:
        seeds.append(seed)
        redraw(attention, seed)

    monkeypatch.setattr(FavorAttention, "redraw", recorded)
    given = {"num_features": "auto", "target": 0.9, "cap": 32, "progress": False}
    subquad.calibrate(layer(), batches(), seed=5, **given)
    of_layer = derived_seed(5, 0)
    assert seeds == [derived_seed(of_layer, draw) for draw in range(1, DRAWS)]


def test_what_cannot_be_reached_is_refused_and_changes_nothing() -> None:
    attention = layer()
    before = copy.deepcopy(attention.state_dict())
    with pytest.raises(CalibrationError) as raised:
        subquad.calibrate(attention, batches(), num_features="auto", target=0.001, cap=64)
    words = str(raised.value)
    assert words.startswith("calibrate: 1 of 1 layers do not reach target=0.001 with up to 64 features of estimator=")
    assert "Nothing was changed." in words
    assert attention.estimator == "positive"
    assert all(torch.equal(x, before[name]) for name, x in attention.state_dict().items())


# Learned features -----------------------------------------------------------------------------------------------------


def test_hedgehog_features_start_sharp() -> None:
    attention = layer(estimator="hedgehog")
    call = Call(*stretched(0), False, None, attention.options.scale)
    start_features(attention, [call], rows=64, seed=0)
    features = attention.features
    assert isinstance(features, HedgehogFeatures)
    for x, weight in ((call.q, features.query), (call.k, features.key)):
        projected = attention.options.scale**0.5 * x @ weight.mT
        assert_close(projected.square().mean((0, 2, 3)).sqrt(), torch.full((2,), SHARPNESS), 1e-5, "size of W x")


def test_the_offset_brings_the_far_mass_to_its_size() -> None:
    attention = layer(8, estimator="hedgehog")
    call = Call(*stretched(0), True, None, attention.options.scale)
    rows = torch.arange(LENGTH)
    features = attention.features
    assert isinstance(features, HedgehogFeatures)
    features.start(torch.ones(2), torch.ones(2), 0)
    _, missing, weight = _far_mass(attention, call, rows)
    before = (weight * missing.square()).sum() / weight.sum()
    start_features(attention, [call], rows=LENGTH, seed=0)
    _, missing, weight = _far_mass(attention, call, rows)
    after = (weight * missing.square()).sum() / weight.sum()
    assert after < 0.5 * before


def test_features_start_the_same_whatever_their_offset_was() -> None:
    calls = [Call(*stretched(0), True, None, layer().options.scale)]
    one, other = (layer(8, estimator="hedgehog") for _ in range(2))
    assert isinstance(other.features, HedgehogFeatures)
    assert other.features.offset_weight is not None
    assert other.features.offset_bias is not None
    with torch.no_grad():
        other.features.offset_weight.fill_(1)
        other.features.offset_bias.fill_(3)
    for attention in (one, other):
        start_features(attention, calls, rows=64, seed=0)
    assert all(map(torch.equal, one.features.state_dict().values(), other.features.state_dict().values()))


def test_training_lowers_the_error() -> None:
    attention = layer(8, estimator="hedgehog")
    calls = [Call(*stretched(seed), True, None, attention.options.scale) for seed in range(2)]
    start_features(attention, calls, rows=64, seed=0)
    measure = ExactOutputs(calls)
    before = measure.errors(attention).mean()
    train_features(attention, calls, steps=40, seed=0)
    assert measure.errors(attention).mean() < 0.9 * before


def test_training_tells_every_step() -> None:
    attention = layer(8, estimator="hedgehog")
    told: list[int] = []
    calls = [Call(*stretched(0), True, None, attention.options.scale)]
    train_features(attention, calls, steps=3, seed=0, progress=told.append)
    assert told == [1, 1, 1]


def test_a_step_takes_as_many_sequences_as_make_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 10, 1)
    call = Call(numbered, numbered, numbered, False, None, 1.0).answered(numbered, exact=True)
    generator = torch.Generator().manual_seed(0)
    for tokens, count in ((1, 1), (19, 1), (20, 2), (49, 4)):
        monkeypatch.setattr(training, "TOKENS_PER_STEP", tokens)
        some = training._some_sequences(call, generator)
        chosen = some.q[:, 0, 0, 0].tolist()
        assert len(set(chosen)) == len(chosen) == count
        assert torch.equal(some.exact(), some.q)
    monkeypatch.setattr(training, "TOKENS_PER_STEP", 50)
    assert training._some_sequences(call, generator) is call


def test_far_mass_of_the_gaussian_kernel() -> None:
    """What a key brings is exp(-|x - y|^2 / 2); that of the query cancels, like everything common to a row."""
    attention = layer(8, estimator="hedgehog", kernel="gaussian")
    q, k, v = (t.double() for t in stretched(0))
    scale = attention.options.scale
    rows = torch.arange(LENGTH)
    _, missing, weight = _far_mass(attention, Call(q, k, v, True, None, scale, gaussian=True), rows)
    x, y = q * scale**0.5, k * scale**0.5
    shift = (y.square().sum(-1) / 2)[:, :, None]
    far = far_pairs(attention, Call(q, k, v, True, None, scale), rows)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    logits = (x @ y.mT - shift).masked_fill(~visible, -torch.inf)
    exact = logits.masked_fill(~far, -torch.inf).logsumexp(-1)
    share = (exact - logits.logsumexp(-1)).exp()
    some = (far & visible).any(-1).expand_as(exact)
    assert_close(weight[some], (share * (1 - share) + 1e-3)[some], 1e-9)
    estimate = training._log_hedgehog_estimate(x, y, attention.feature_map) - shift
    guess = estimate.masked_fill(~(far & visible), -torch.inf).logsumexp(-1)
    assert_close(missing[some], (exact - guess)[some], 1e-9)


def test_reports_are_saved(tmp_path: Path) -> None:
    report = CalibrationReport("sharp", True, (LayerReport("a", 8, (0.5, 0.25), (0.125, 0.25)),))
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "estimator": "sharp",
        "held_out": True,
        "layers": [{"name": "a", "num_features": 8, "before": [0.5, 0.25], "after": [0.125, 0.25]}],
    }
    assert (report.mean_before, report.mean_after) == (0.375, 0.1875)


# Heads that are out of the ordinary ----------------------------------------------------------------------------------


def test_what_is_no_number_is_no_small_error() -> None:
    q, k, v = stretched(0)
    q[:, 0] = torch.nan
    attention = layer()
    error = ExactOutputs([Call(q, k, v, False, None, attention.options.scale)]).errors(attention)
    assert bool(error.isnan()[0])
    assert not bool(error.isnan()[1])


def test_a_head_without_output_harms_no_other() -> None:
    q, k, v = stretched(0)
    v[:, 0] = 0
    attention = layer()
    report = subquad.calibrate(attention, [(q, k, v)], estimator="hedgehog", steps=5)
    assert all(bool(parameter.isfinite().all()) for parameter in attention.parameters())
    assert all(parameter.grad is None for parameter in attention.parameters())
    assert report.layers[0].after[0] == 0
    assert 0 < report.layers[0].after[1] < 1


def test_training_on_no_numbers_is_refused() -> None:
    q, k, v = stretched(0)
    v[:, 0] = torch.nan
    attention = layer()
    before = attention.features
    with pytest.raises(CalibrationError) as raised:
        subquad.calibrate(attention, [(q, k, v)], estimator="hedgehog", steps=2)
    assert str(raised.value) == (
        "calibrate: training ended in non-finite features, and nothing was changed; are all queries, keys and "
        "values of the model finite?"
    )
    assert attention.features is before


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_a_head_that_looks_at_one_key_alone(size: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    q[:, 0] = 0.1 * q[:, 0] + 5
    k[:, 0, 3] += size
    attention = FavorAttention(8, 16, near=0, sinks=0, num_heads=2)
    report = subquad.calibrate(attention, [(q, k, v)])
    assert all(0 <= error < 2 for error in report.layers[0].after), report


@pytest.mark.parametrize("estimator", ["calibrated", "exponential", "hedgehog"])
def test_a_head_that_never_looks_far(estimator: str) -> None:
    """In float32 the weights of its far keys are all zero."""
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    places = torch.nn.functional.normalize(torch.randn(10, 8, generator=torch.Generator().manual_seed(1)), dim=-1)
    q[:, 0] = k[:, 0] = 60 * places.repeat_interleave(4, 0)
    attention = FavorAttention(8, 16, near=4, sinks=0, num_heads=2)
    report = subquad.calibrate(attention, [(q, k, v)], **brief(estimator))
    assert report.layers[0].after[0] < 1e-3
    assert all(bool(x.isfinite().all()) for x in attention.state_dict().values())


def test_features_change_whole_or_not_at_all() -> None:
    attention = layer()
    before = repr(attention)
    with pytest.raises(subquad.errors.ConfigError):
        attention.set_features("hedgehog", 33, None)
    assert repr(attention) == before


# Models ---------------------------------------------------------------------------------------------------------------


def model(**options: Any) -> SubquadForCausalLM:
    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=20,
        hidden_size=64,
        num_hidden_layers=3,
        num_key_value_heads=2,
        attention=["favor", "softmax", "favor"],
        attention_options=[{"num_features": 32, "near": 8}, {}, {"num_features": 32, "near": 8}],
        initializer_range=0.3,
        **options,
    )
    return SubquadForCausalLM(config).eval()


def test_a_model_is_calibrated_in_place() -> None:
    ids = [torch.randint(0, 20, (2, 80), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    favor = model()
    names = []
    report = subquad.calibrate(favor, ids, progress=lambda name, done, total: names.append((name, done, total)))
    assert [layer.name for layer in report.layers] == [f"model.layers.{i}.attention.mechanism" for i in (0, 2)]
    assert [m.estimator for m in favor.mechanisms() if isinstance(m, FavorAttention)] == ["calibrated"] * 2
    assert favor.config.layer_attention(0)[1]["estimator"] == "calibrated"
    assert favor.config.layer_attention(1) == ("softmax", {})
    assert names[0] == ("running the model", 1, 2)
    assert names[-1] == ("done", 2, 2)


def test_batches_to_fit_and_to_measure() -> None:
    made: list[Any] = list(range(11))
    assert split(made[:1]) == ([0], [0])
    assert split(made[:2]) == ([0], [1])
    assert split(made) == ([0, 1, 2, 3, 5, 6, 7, 8], [4, 9, 10])


# Warnings and errors --------------------------------------------------------------------------------------------------


def test_features_that_were_not_fitted_say_so() -> None:
    with pytest.warns(UncalibratedWarning) as caught:
        FavorAttention(D, estimator="sharp")
    assert str(caught[0].message) == (
        "favor: estimator='sharp' is not fitted to data yet and assumes q, k ~ N(0, I); "
        "use subquad.calibrate(model, batches)"
    )
    with torch.device("meta"):
        FavorAttention(D, estimator="sharp")  # a model that is being loaded: no warning, or this test fails


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "sharpp"}, "calibrate: estimator must be one of optimal, sharp, calibrated, hedgehog, "),
        ({"num_features": 0}, "calibrate: num_features must be a whole number of at least 1, got 0"),
        ({"num_features": "auto", "target": 2}, "calibrate: target must lie between 0 and 1, got 2"),
        ({"seed": -1}, "calibrate: seed must be a whole number of at least 0, got -1"),
        (
            {"steps": 9},
            "calibrate: steps is for learned features, estimator='hedgehog' or 'exponential'; leave it out",
        ),
        ({"cap": 9}, "calibrate: cap is for num_features='auto'; leave it out"),
        ({"estimator": "hedgehog", "steps": 0}, "calibrate: steps must be a whole number of at least 1, got 0"),
        (
            {"estimator": "sharp", "transform": True},
            "calibrate: transform=True needs estimator='calibrated', got 'sharp'",
        ),
        (
            {"estimator": "hedgehog", "num_features": "auto", "cap": 33},
            "calibrate: estimator='hedgehog' has an even number of features, got cap=33",
        ),
    ],
)
def test_wrong_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(subquad.errors.ConfigError) as raised:
        subquad.calibrate(layer(), batches(), **options)
    assert str(raised.value).startswith(words)


def test_wrong_batches_and_models() -> None:
    for given, words in (
        (torch.zeros(2, 2), "calibrate: batches must be a list of batches, got Tensor; use [batch]"),
        (UserDict(input_ids=1), "calibrate: batches must be a list of batches, got UserDict; use [batch]"),
        ([], "calibrate: there are no batches; a few thousand tokens do"),
    ):
        with pytest.raises(subquad.SubquadError) as raised:
            subquad.calibrate(layer(), given)  # pyright: ignore[reportArgumentType]
        assert str(raised.value) == words
    with pytest.raises(subquad.errors.ConfigError) as raised:
        subquad.calibrate(torch.nn.Linear(2, 2), [torch.zeros(1, 2)])
    assert str(raised.value) == (
        "calibrate: Linear has no favor or softmax attention of subquad and is no Hugging Face model"
    )
    with pytest.raises(subquad.errors.ConfigError) as raised:
        subquad.calibrate(subquad.SoftmaxAttention(D), batches())
    assert str(raised.value) == "calibrate: SoftmaxAttention has no FavorAttention; there is nothing to calibrate"
    with pytest.raises(subquad.errors.ConfigError) as raised:
        subquad.calibrate(layer(64), batches())
    assert str(raised.value) == (
        "calibrate: with near=64 and sinks=2 a sequence of 96 tokens is all exact, there is nothing to estimate; "
        "give longer sequences"
    )
    with pytest.raises(subquad.errors.ConfigError) as raised:
        subquad.calibrate(layer(47), batches(2), rows=1, estimator="sharp", seed=1)
    assert str(raised.value) == (
        "calibrate: rows=1 queries were sampled of each batch, and none of them has a key far away; "
        "sample more, or give longer sequences"
    )
