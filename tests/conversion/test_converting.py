"""Pretrained models, converted key head by key head within a budget."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AlbertConfig, AlbertForMaskedLM

import subquad
from subquad import errors
from subquad.conversion import Conversion
from subquad.conversion.candidates import Shape, candidates, priced
from subquad.conversion.generation import CHILD
from subquad.conversion.kept import Kept, Settings
from subquad.conversion.pricing import Texts, priced_layers
from subquad.conversion.sensitivity import sensitivity
from subquad.conversion.swap import module_scale
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention
from subquad.recording.progress import silent
from subquad.recording.record import Recording
from tiny_heads import FAMILIES, SIZES, bert, gpt2, llama
from tiny_models import random_ids

SMALL: dict[str, Any] = {"window": 32, "sinks": 1, "num_features": 8, "steps": 2, "progress": False}
HEADS = ("window", "features", "exact")  # without pages
BATCHES = [random_ids(2, 60), random_ids(2, 60).flip(1), random_ids(2, 60).roll(3, 1)]


def logits(model: Any, ids: Tensor = BATCHES[0]) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def heads(report: Conversion) -> list[str]:
    return [head for layer in report.layers for head in layer.heads]


def mechanisms(model: Any) -> list[Any]:
    return [getattr(module, CHILD) for module in model.modules() if hasattr(module, CHILD)]


def test_all_heads_exact_change_nothing() -> None:
    model = llama()
    before = logits(model)
    report = subquad.convert(model, BATCHES, budget="exact 100%", kinds=HEADS, **SMALL)
    assert heads(report) == ["exact"] * 4
    assert report.nats == 0
    assert report.nbytes == report.all_nbytes == 4 * 60 * 8 * 8  # keys and values of 4 numbers in float64
    torch.testing.assert_close(logits(model), before)


@pytest.mark.parametrize("share", [0, 25, 50, 75])
def test_so_many_heads_stay_exact(share: int) -> None:
    budget = f"exact {share}%" if share else "constant"
    model = llama()
    report = subquad.convert(model, BATCHES, budget=budget, kinds=HEADS if share else None, **SMALL)
    assert heads(report).count("exact") == share // 25
    assert sum(part.state_grows for part in mechanisms(model)) == sum("exact" in layer.heads for layer in report.layers)


def test_a_head_that_gains_nothing_by_features_has_none() -> None:
    """Each head takes what loses less, and what it took is what the report says and what runs."""
    model = llama()
    report = subquad.convert(model, BATCHES, budget="constant", **SMALL)
    assert set(heads(report)) <= {"window 32", "features"}
    both = [subquad.convert(llama(), BATCHES, kinds=[kind], **SMALL) for kind in ("window", "features")]
    for layer, window, features in zip(report.layers, *(other.layers for other in both), strict=True):
        for head, took in enumerate(layer.heads):
            assert layer.nats[head] == min(window.nats[head], features.nats[head])
            assert (took == "features") == (features.nats[head] < window.nats[head])


def test_errors_of_query_heads_add_up() -> None:
    """Nats of a window, by hand: the errors of both query heads of a key head, weighed by what they cost."""
    model = llama()
    report = subquad.convert(model, BATCHES, kinds=["window"], **SMALL)
    cost = sensitivity(llama(), BATCHES, seed=0, tell=silent)
    window = subquad.WindowAttention(4, 32, global_tokens=1)
    for layer, recorded in zip(report.layers, Recording(llama(), BATCHES[2:], op="test", exact=True), strict=True):
        (call,) = recorded.calls
        off = (call.attend(window) - call.exact()).transpose(0, 1).flatten(1, 2)
        nats = ((off @ cost[layer.name].double()) * off).sum((1, 2)) / 2 / off.shape[1]
        assert layer.nats == pytest.approx(nats.view(2, 2).sum(1).tolist(), rel=1e-4)


def test_heads_get_their_own_features() -> None:
    """Every part of a mixed layer has those rows of the fitted features that belong to its heads."""
    alone, mixed = llama(), llama()
    subquad.convert(alone, BATCHES, kinds=["features"], **SMALL)
    report = subquad.convert(mixed, BATCHES, budget="exact 25%", kinds=["features", "exact"], **SMALL)
    whole = next(i for i, layer in enumerate(report.layers) if len(set(layer.heads)) == 2)
    part = mechanisms(mixed)[whole]
    assert isinstance(part, MixedAttention)
    head = report.layers[whole].heads.index("features")
    (favor,) = (own for own in part.mechanisms() if isinstance(own, FavorAttention))
    for name, parameter in favor.features.named_parameters():
        assert torch.equal(parameter[0], dict(mechanisms(alone)[whole].features.named_parameters())[name][head])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", ["cache 70%", "cache 80%", "loss 1%"])
def test_budgets_are_kept(budget: str, dtype: torch.dtype) -> None:
    """Also in half precision, where the sums of features do not become smaller."""
    model = llama().to(dtype)
    report = subquad.convert(model, BATCHES, budget=budget, kinds=HEADS, **SMALL)
    what, share = budget.split()
    if what == "cache":
        assert report.nbytes <= float(share[:-1]) / 100 * report.all_nbytes
    else:
        assert report.measured.nats <= math.log(1.01)
    cache = model(BATCHES[0][:1], use_cache=True).past_key_values
    small = 16 * len(heads(report)) + 2 * 60  # lengths of sequences, and which of their tokens are real
    assert report.nbytes == pytest.approx(cache.nbytes(), abs=small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": "cache 20%", "kinds": HEADS},
            "convert: no choice of kinds (window, features, exact) keeps the budget 'cache 20%': the least there is "
            "takes 53.4 %; allow more, or a smaller window or fewer features",
        ),
        (
            {"budget": "exact 50%", "kinds": ["exact"]},
            "convert: no choice of kinds (exact) keeps the budget 'exact 50%': the least there is takes 100.0 %; allow "
            "more, or a smaller window or fewer features",
        ),
    ],
    ids=["cache", "exact"],
)
def test_a_budget_that_nothing_keeps_changes_nothing(options: dict[str, Any], message: str) -> None:
    model = llama()
    with pytest.raises(errors.ConfigError) as raised:
        subquad.convert(model, BATCHES, **{**SMALL, **options})
    assert str(raised.value) == message
    assert not mechanisms(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_comes_back_as_itself(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made, ids = FAMILIES[family]().to(dtype), BATCHES[0]
    made.save_pretrained(tmp_path / "exact")
    model = type(made).from_pretrained(tmp_path / "exact")  # whose rotary angles are in float32
    subquad.convert(model, BATCHES, budget="exact 50%", kinds=HEADS, **SMALL)
    before = logits(model)
    model.save_pretrained(tmp_path / "new")
    again = subquad.load(tmp_path / "new")
    assert again.dtype == dtype
    assert torch.equal(logits(again, ids), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_priced_is_what_runs(family: str) -> None:
    """Whatever a model does to its queries before attention, and whatever their scale."""
    model, exact = FAMILIES[family](), FAMILIES[family]()
    cost = sensitivity(exact, BATCHES, seed=0, tell=silent)
    report = subquad.convert(model, BATCHES, kinds=["features"], **SMALL)
    modules = dict(model.named_modules())
    for layer, recorded in zip(report.layers, Recording(exact, BATCHES[2:], op="test", exact=True), strict=True):
        (call,) = recorded.calls
        scale = module_scale(modules[layer.name], call.q.shape[-1])
        out = getattr(modules[layer.name], CHILD)(call.q * (call.scale / scale), call.k, call.v, causal=call.causal)
        off = (out - call.exact()).transpose(0, 1).flatten(1, 2)
        nats = ((off @ cost[layer.name].double()) * off).sum((1, 2)) / 2 / off.shape[1]
        assert layer.nats == pytest.approx(nats.unflatten(0, (len(layer.nats), -1)).sum(1).tolist(), rel=1e-4)


def test_a_layer_that_is_called_several_times_keeps_batches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out batches are held out of all its calls."""
    seen: list[tuple[int, int]] = []

    def judge(found: Any, fit: Any, judges: Any, **options: Any) -> Any:
        seen.append((len(fit), len(judges.calls)))
        assert not any(torch.equal(a.v[:1, :, :4], b.v[:1, :, :4]) for a in fit for b in judges.calls)
        return priced(found, fit, judges, **options)

    monkeypatch.setattr("subquad.conversion.pricing.priced", judge)
    torch.manual_seed(0)
    sizes = {**SIZES, "embedding_size": 8, "intermediate_size": 16, "max_position_embeddings": 64}
    model = AlbertForMaskedLM(AlbertConfig(**sizes, initializer_range=0.5)).eval()
    report = subquad.convert(model, BATCHES, **SMALL)
    assert seen == [(4, 2)]  # two batches and one, each through two layers that are one module
    assert len(report.layers) == 1


def test_batches_without_tokens_are_refused() -> None:
    model, ids = llama(), BATCHES[0]
    batches = [{"input_ids": ids, "attention_mask": torch.full_like(ids, i < 2)} for i in range(3)]
    with pytest.raises(errors.CalibrationError) as raised:
        subquad.convert(model, batches, **SMALL)
    assert str(raised.value) == (
        "convert: model.layers.0.self_attn: what 'window 32' costs is not a finite number; give batches with real "
        "tokens, or load the model in float32"
    )
    assert not mechanisms(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_reported_is_what_runs(family: str) -> None:
    """The divergence on the batch that was held out, and on half of it read twice."""
    exact, model = FAMILIES[family](), FAMILIES[family]()
    report = subquad.convert(model, BATCHES, budget="exact 25%", kinds=["features", "exact"], **SMALL)
    held = BATCHES[2]
    texts = [held, held[:, :30].repeat(1, 2)] if report.measured.copying is not None else [held]
    found = []
    for ids in texts:
        was, now = (logits(each, ids).float().log_softmax(-1) for each in (exact, model))
        found.append((was.exp() * (was - now)).sum(-1))
    assert report.measured.nats == pytest.approx(found[0].mean().item(), rel=1e-3)
    assert (family == "bert") == (report.measured.copying is None)
    if report.measured.copying is not None:
        assert report.measured.copying == pytest.approx(found[1][:, 30:].mean().item(), rel=1e-3)


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_a_converted_model_generates_with_states(make: Any) -> None:
    model = make()
    subquad.convert(model, BATCHES, budget="exact 50%", kinds=HEADS, **SMALL)
    ids = BATCHES[0][:, :40]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_encoders() -> None:
    """Nothing exact at all, or a window on both sides."""
    for window in (0, 32):
        report = subquad.convert(bert(), BATCHES, **{**SMALL, "window": window})
        assert set(heads(report)) <= {"features", "window 32"}
        assert report.all_nbytes == 0
        assert report.measured.copying is None  # where it is read first, the second time is seen
        assert "states" not in str(report)
    with pytest.raises(errors.ConfigError, match="about the memory of a causal model, and this one looks both ways"):
        subquad.convert(bert(), BATCHES, budget="cache 20%", **SMALL)


def test_a_converted_model_is_converted_anew() -> None:
    """As if it had not been converted: the first conversion leaves nothing behind."""
    once, twice = llama(), llama()
    subquad.convert(twice, BATCHES, budget="exact 100%", kinds=HEADS, **SMALL)
    reports = [subquad.convert(model, BATCHES, **SMALL) for model in (once, twice)]
    assert reports[0] == reports[1]
    assert torch.equal(logits(once), logits(twice))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("moment", ["fitting", "measuring"])
def test_failure_leaves_a_converted_model_as_it_was(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    subquad.convert(model, BATCHES, **SMALL)
    before, had = logits(model), mechanisms(model)
    stop = stop_at("model.layers.1.self_attn")
    if moment == "measuring":
        stop = False
        monkeypatch.setattr("subquad.conversion.measured.Judge.measured", raises_stopped)
    with pytest.raises(StoppedError):
        subquad.convert(model, BATCHES, **{**SMALL, "progress": stop})
    assert [id(x) for x in mechanisms(model)] == [id(x) for x in had]
    assert torch.equal(logits(model), before)
    fresh = llama()
    with pytest.raises(StoppedError):
        subquad.convert(fresh, BATCHES, **{**SMALL, "progress": stop})
    assert not mechanisms(fresh)


def raises_stopped(_: Any) -> None:
    raise StoppedError


def stop_at(layer: str) -> Any:
    def tell(what: str, done: int, total: int) -> None:
        if what == f"fitting {layer}":
            raise StoppedError

    return tell


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    whole, broken = llama(), llama()
    want = subquad.convert(whole, BATCHES, **SMALL)
    before = logits(broken)
    options: dict[str, Any] = {**SMALL, "folder": tmp_path}
    with pytest.raises(StoppedError):
        subquad.convert(broken, BATCHES, **{**options, "progress": stop_at("model.layers.1.self_attn")})
    assert torch.equal(logits(broken), before)
    assert not mechanisms(broken)
    first = tmp_path / "model.layers.0.self_attn.safetensors"
    written = first.stat().st_mtime_ns
    assert subquad.convert(broken, BATCHES, **options) == want
    assert torch.equal(logits(broken), logits(whole))
    assert first.stat().st_mtime_ns == written
    told: list[str] = []
    again = llama()
    options["progress"] = lambda what, *_: told.append(what)
    assert subquad.convert(again, BATCHES, **options) == want
    assert set(told) == {"measuring what is proposed", "done"}


def test_another_budget_fits_nothing_again(tmp_path: Path) -> None:
    """Candidates that were not judged yet are added to those that were."""
    subquad.convert(llama(), BATCHES, **SMALL, folder=tmp_path)
    file = tmp_path / "model.layers.0.self_attn.safetensors"
    fitted = load_file(file)["feature.query"]
    kept, fresh = llama(), llama()
    options: dict[str, Any] = {**SMALL, "budget": "cache 60%", "kinds": HEADS}
    assert subquad.convert(kept, BATCHES, **options, folder=tmp_path) == subquad.convert(fresh, BATCHES, **options)
    assert torch.equal(logits(kept), logits(fresh))
    assert torch.equal(load_file(file)["feature.query"], fitted)
    assert {"price.window 32", "price.window 128", "price.features", "price.exact"} <= set(load_file(file))
    told: list[str] = []
    subquad.convert(llama(), BATCHES, **{**options, "progress": lambda what, *_: told.append(what)}, folder=tmp_path)
    assert set(told) == {"measuring what is proposed", "done"}


def test_what_is_kept_belongs_to_one_conversion(tmp_path: Path) -> None:
    subquad.convert(llama(), BATCHES, **SMALL, folder=tmp_path)
    message = (
        f"convert: {tmp_path} holds a conversion of another model, with other batches or other options; give the same "
        "again, or another folder"
    )
    other_weights = llama()
    other_weights.lm_head.weight.data[0] += 1
    wrong: list[tuple[Any, list[Tensor], dict[str, Any]]] = [
        (gpt2(), BATCHES, {}),
        (other_weights, BATCHES, {}),
        (llama(rms_norm_eps=0.5), BATCHES, {}),
        (llama(), BATCHES[:2], {}),
        (llama(), BATCHES, {"steps": 3}),
        (llama(), BATCHES, {"seed": 1}),
        (llama(), BATCHES, {"num_features": 10}),
    ]
    for model, batches, options in wrong:
        with pytest.raises(errors.ConfigError) as raised:
            subquad.convert(model, batches, **{**SMALL, **options}, folder=tmp_path)
        assert str(raised.value) == message


def test_damage_is_one_clear_error(tmp_path: Path) -> None:
    subquad.convert(llama(), BATCHES, **SMALL, folder=tmp_path)
    path = tmp_path / "model.layers.0.self_attn.safetensors"
    whole = path.read_bytes()
    for damage in (b"", whole[:50], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damage)
        model = llama()
        with pytest.raises(errors.CheckpointError) as raised:
            subquad.convert(model, BATCHES, **SMALL, folder=tmp_path)
        assert str(raised.value).startswith(f"{path}: is damaged (")
        assert str(raised.value).endswith("); remove it, and what it held is made again")
        assert not mechanisms(model)


BUDGETS = "'constant', 'exact 10%' (of the key heads), 'cache 20%' (of the memory) or 'loss 1%' (of perplexity)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "10%"}, f"convert: budget must be {BUDGETS}, got '10%'"),
        ({"budget": "exact 0%"}, f"convert: budget must be {BUDGETS}, got 'exact 0%'"),
        ({"budget": "cache 120%"}, f"convert: budget must be {BUDGETS}, got 'cache 120%'"),
        ({"budget": 0.1}, f"convert: budget must be {BUDGETS}, got 0.1"),
        ({"window": 16}, "convert: window must be a multiple of 32, or 0 for none, got 16"),
        ({"window": -32}, "convert: window must be a whole number of at least 0, got -32"),
        ({"num_features": 7}, "convert: num_features must be even, got 7"),
        ({"sinks": -1}, "convert: sinks must be a whole number of at least 0, got -1"),
        (
            {"kinds": ["window"], "window": 0},
            "convert: nothing is left of kinds, as window=0 leaves no windows; allow others",
        ),
        (
            {"budget": "exact 10%"},
            "convert: budget 'exact 10%' of 4 key heads is none; use 'constant', or a larger share",
        ),
        ({"copying": -1}, "convert: copying must be a number of at least 0, got -1"),
        ({"copying": "much"}, "convert: copying must be a number of at least 0, got 'much'"),
        ({"steps": 0}, "convert: steps must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "convert: seed must be a whole number of at least 0, got -1"),
        ({"kinds": "window"}, "convert: kinds must be a list of window, features, got 'window'"),
        (
            {"kinds": ["exact"]},
            "convert: with budget 'constant': every kind must be one of window, features, got 'exact'",
        ),
    ],
    ids=str,
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError) as raised:
        subquad.convert(llama(), BATCHES, **{**SMALL, **options})
    assert str(raised.value) == message


def test_batches_that_are_all_exact_are_refused() -> None:
    model = llama()
    with pytest.raises(errors.ConfigError, match="is all exact, there is nothing to estimate; give longer sequences"):
        subquad.convert(model, [random_ids(2, 20)], **SMALL)
    assert not mechanisms(model)


def test_the_report_is_kept_as_json(tmp_path: Path) -> None:
    report = subquad.convert(llama(), BATCHES, budget="exact 25%", kinds=HEADS, **SMALL)
    report.save(tmp_path / "conversion.json")
    text = (tmp_path / "conversion.json").read_text()
    assert '"budget": "exact 25%"' in text
    shown = str(report)
    measured = report.measured
    assert shown.startswith(
        f"budget: exact 25%; on held-out batches: loss {measured.nats:+.4f} nats per token (perplex"
    )
    assert f"), {measured.copying:+.3f} where a text comes again; prices of heads add up to {report.nats:.4f}" in shown
    assert all(layer.name in shown for layer in report.layers)
    assert "of keys and values" in shown


def test_copying_is_priced_where_texts_come_again() -> None:
    """By hand: errors in the second half of half of the held-out batch, read twice."""
    window = subquad.WindowAttention(4, 32, global_tokens=1)
    texts = Texts(BATCHES, causal=True)
    (copy,) = texts.copies
    assert torch.equal(copy, BATCHES[2][:, :30].repeat(1, 2))
    kept = Kept(None, llama(), BATCHES, Settings(Shape(32, 1, 8), 2, 0))
    found, names = candidates(Shape(32, 1, 8), ["window"]), [f"model.layers.{i}.self_attn" for i in range(2)]
    priced = priced_layers(llama(), texts, Settings(Shape(32, 1, 8), 2, 0), names, found, kept, silent)
    short = [ids[:, :30].repeat(1, 2) for ids in BATCHES]
    cost = sensitivity(llama(), short, seed=0, tell=silent, second_half=True)
    for name, recorded in zip(names, Recording(llama(), [copy], op="test", exact=True), strict=True):
        (call,) = recorded.calls
        off = (call.attend(window) - call.exact())[:, :, 30:].transpose(0, 1).flatten(1, 2)
        nats = ((off @ cost[name].double()) * off).sum((1, 2)) / 2 / off.shape[1]
        assert priced[name].prices["window 32"].copying.tolist() == pytest.approx(
            nats.view(2, 2).sum(1).tolist(), rel=1e-4
        )
