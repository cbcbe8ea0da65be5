"""`subquad bench fidelity` and what it measures, in miniature; nothing is downloaded."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from subquad.bench import fidelity, inputs
from subquad.bench.fidelity import Asked, Plan, attention_maps, measure
from subquad.bench.inputs import Input, load_input, model_input, spread
from subquad.bench.real_heads import RealModel
from subquad.cli import main
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.baselines import near_attention, uniform_average
from subquad.recording.calls import Call
from tiny_models import random_ids

SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 23}


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, intermediate_size=16, initializer_range=0.3)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).eval()


def batches(number: int, length: int) -> list[dict[str, Tensor]]:
    ids = random_ids(2 * number, length)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return [{"input_ids": a, "attention_mask": b} for a, b in zip(ids.split(2), mask.split(2), strict=True)]


def tiny(make: Any = bert, layers: int = 2) -> Input:
    return model_input("tiny", "a tiny model", make(), batches(2, 24), batches(1, 20), near=4, layers=layers)


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", inputs.SYNTHETIC)
def test_synthetic_heads(name: str) -> None:
    given = load_input(name, quick=True)
    (layer,) = given.layers
    fit, test = layer.fit[0], layer.test[0]
    assert fit.q.shape == test.q.shape == (1, 4, 128, 64)
    assert not torch.equal(fit.k, test.k)
    again = load_input(name, quick=True).layers[0].test[0]
    assert torch.equal(again.q, test.q)
    assert not torch.equal(load_input(name, quick=True, seed=1).layers[0].test[0].q, test.q)


def test_sizes_of_synthetic_heads() -> None:
    """The logits of "small" are small, those of "normal" have the deviation 1, those of "heavy" have heavy tails."""
    logits = {}
    for name in inputs.SYNTHETIC:
        call = load_input(name).layers[0].test[0]
        logits[name] = call.q @ call.k.mT * call.scale
    assert logits["small"].std() == pytest.approx(1 / 8, rel=0.02)
    assert logits["normal"].std() == pytest.approx(1, rel=0.02)
    kurtosis = {name: float((x - x.mean()).pow(4).mean() / x.var() ** 2) for name, x in logits.items()}
    assert kurtosis["heavy"] > 2 * kurtosis["normal"]
    heavy = load_input("heavy").layers[0].test[0]  # published figures are of these
    assert logits["heavy"].std() == pytest.approx(2.2422, rel=1e-4)
    assert heavy.v.std() == pytest.approx(0.87470, rel=1e-4)


@pytest.mark.parametrize("make", [bert, llama])
def test_heads_of_a_model(make: Any) -> None:
    given = tiny(make)
    assert [layer.name.split(".")[-1] for layer in given.layers] == ["self" if make is bert else "self_attn"] * 2
    assert given.title == "a tiny model: 8 heads of 2 layers"
    assert given.layers[0].test[0].causal == (make is llama)
    assert len(tiny(make, layers=0).layers) == 3
    assert [spread(1, 6), spread(2, 6), spread(3, 6), spread(6, 6)] == [[3], [0, 5], [0, 2, 5], [0, 1, 2, 3, 4, 5]]


# Baselines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, llama])
def test_uniform_average_is_attention_without_queries(make: Any) -> None:
    call = tiny(make).layers[1].test[0]
    real = call.real[:, None, :, None]
    want = call.replace(q=torch.zeros_like(call.q)).exact()
    torch.testing.assert_close(uniform_average(call) * real, want * real)


@pytest.mark.parametrize("make", [bert, llama])
def test_window_is_attention_that_sees_no_more(make: Any) -> None:
    call = tiny(make).layers[1].test[0]
    everything = FavorAttention(4, 2, near=32, sinks=0)
    real = call.real[:, None, :, None]
    torch.testing.assert_close(near_attention(everything, call) * real, call.exact() * real)
    block = FavorAttention(4, 2, near=4, sinks=1)
    out = near_attention(block, call)
    far = call.k.clone()
    far[:, :, 4] += 100.0  # the second block, which the last one does not see
    torch.testing.assert_close(near_attention(block, call.replace(k=far))[:, :, 12:16], out[:, :, 12:16])
    assert not torch.allclose(near_attention(block, call.replace(k=far))[:, :, 8:12], out[:, :, 8:12])


# Measuring ------------------------------------------------------------------------------------------------------------


def test_records_are_the_errors_of_the_mechanisms() -> None:
    given, counted = tiny(), []
    plan = Plan(("positive", "calibrated", "trigonometric"), ("iid", "orthogonal"), (8, 16), draws=3)
    records = measure(given, plan, counted.append)
    assert sum(counted) == plan.work(given) == 2 * 3 * (3 * 2 * 2 + 2 * 1 * 2)
    assert len(records) == 12 + 1 + 4 + 2
    assert {r.estimator for r in records if r.near} == {"uniform", "window", "positive", "calibrated"}
    found = next(r for r in records if (r.near, r.estimator, r.coupling, r.num_features) == (4, "positive", "iid", 16))
    errors = []
    for number, layer in enumerate(given.layers):
        asked = Asked(layer, 4, 4, fidelity.derived_seed(0, number))
        made = asked.mechanisms("positive", "iid", 16, 3, 1)
        errors.append(torch.stack([own_errors(mechanism, layer.test) for mechanism in made]))
    every = torch.cat(errors, 1)  # [draws, heads]
    assert (found.draws, found.heads, found.sinks) == (3, 8, 4)
    assert found.mean == pytest.approx(float(every.mean()), rel=1e-5)
    assert found.by_head == pytest.approx(every.mean(0).tolist(), rel=1e-5)
    assert found.se_draws == pytest.approx(float(every.mean(1).std() / 3**0.5), rel=1e-4)
    assert found.se_heads == pytest.approx(float(every.mean(0).std() / 8**0.5), rel=1e-4)


def own_errors(mechanism: FavorAttention, calls: list[Call]) -> Tensor:
    (call,) = calls
    keep = call.real[:, None, :, None]
    out, exact = (x * keep for x in (mechanism(call.q, call.k, call.v, key_mask=call.key_mask), call.replace().exact()))
    return ((out - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))).sqrt()


def test_fitted_features_never_see_what_they_are_measured_on() -> None:
    given = tiny()
    plan = Plan(("calibrated", "balanced", "optimal", "hedgehog"), ("orthogonal",), (8,), 1, steps=2)
    (layer, *_) = given.layers
    other = layer._replace(test=[call.replace(q=call.q * 2) for call in layer.test])
    for estimator in plan.estimators:
        maps = [
            next(Asked(x, 4, 4, 1).mechanisms(estimator, "orthogonal", 8, 1, 2)).feature_map.query
            for x in (layer, other)
        ]
        assert torch.equal(*maps)


def test_learned_maps_are_trained_once_and_up_to_a_size() -> None:
    plan = Plan(("positive", "hedgehog", "exponential"), ("iid", "orthogonal"), (64, 128, 256), draws=5)
    cells = list(plan.cells(near=True))
    assert [cell for cell in cells if cell[0] == "hedgehog"] == [
        ("hedgehog", "iid", 64, 1),
        ("hedgehog", "iid", 128, 1),
    ]
    assert len(cells) == 3 + 2 + 2
    assert len(list(plan.cells(near=False))) == 2 * 3 + 2 + 2
    assert list(plan._replace(features=(256,)).cells(near=False))[-1] == ("exponential", "iid", 256, 1)


def test_more_features_and_learning_help() -> None:
    given = load_input("heavy", quick=True)
    plan = Plan(("positive", "balanced", "hedgehog"), ("orthogonal",), (16, 64), 2, (False,), steps=30)
    found = {(r.estimator, r.num_features): r.mean for r in measure(given, plan)}
    assert found["balanced", 64] < found["balanced", 16] < found["positive", 16]
    assert found["hedgehog", 64] < found["positive", 64]


def test_maps_of_one_head() -> None:
    title, maps = attention_maps(
        tiny(llama), Plan(("positive", "sharp", "hedgehog"), ("iid",), (8,), steps=2), tokens=12
    )
    assert title.startswith("a tiny model; model.layers.2.self_attn, head ")
    assert list(maps) == ["exact", "FAVOR+, 8 features", "calibrated, 8 features", "learned, 8 features"]
    for matrix in maps.values():
        assert matrix.shape == (12, 12)
        torch.testing.assert_close(matrix.sum(-1), torch.ones(12))
        assert not matrix.triu(1).any()


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of those that would be downloaded."""

    def load(name: str, **_: Any) -> RealModel:
        make = llama if name == "smollm2" else bert
        return RealModel(name, f"tiny {name}", make(), batches(2, 24), batches(1, 20), near=4)

    monkeypatch.setattr(inputs, "load_model", load)


def test_command(tmp_path: Path, small_models: None, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--inputs", "small,minilm,smollm2", "--quick", "--layers", "1", "--couplings", "iid,orthogonal"]
    assert main(["bench", "fidelity", *chosen, "--output", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr().out
    assert "tiny minilm: 4 heads of 1 layers" in shown
    assert "near and sinks" in shown
    report = json.loads((tmp_path / "new" / "fidelity.json").read_text())
    assert set(report) == {"machine", "options", "inputs", "records"}
    assert report["machine"]["torch"] == torch.__version__
    by_input = {name: {r["estimator"] for r in report["records"] if r["input"] == name} for name in report["inputs"]}
    drawn = {"positive", "hyperbolic", "trigonometric", "optimal", "sharp", "calibrated", "balanced"}
    assert by_input == {
        "small": drawn | {"uniform", "window"},
        "minilm": drawn | {"uniform", "window", "hedgehog"},
        "smollm2": drawn | {"uniform", "window", "hedgehog"},
    }
    pictures = ("couplings", "estimators", "near", "maps_minilm", "maps_smollm2")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "fidelity.json",
        *(f"fidelity_{name}.png" for name in pictures),
    }


def test_command_with_one_field(tmp_path: Path) -> None:
    chosen = ["--inputs", "normal", "--quick", "--near", "--estimators", "positive", "--couplings", "iid"]
    assert main(["bench", "fidelity", *chosen, "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"fidelity.json", "fidelity_near.png"}


KNOWN = "must be one of small, normal, heavy, antiberty, minilm, smollm2"
MISTAKES: dict[str, tuple[list[str], str]] = {
    "input": (["--inputs", "smol"], f"--inputs: each name {KNOWN}, got 'smol' (did you mean 'smollm2'?)"),
    "no input": (["--inputs", ","], "--inputs: is empty; known: small, normal, heavy, antiberty, minilm, smollm2"),
    "estimator": (
        ["--estimators", "favor"],
        "--estimators: each name must be one of positive, hyperbolic, trigonometric, optimal, sharp, calibrated, "
        "balanced, hedgehog, exponential, got 'favor'",
    ),
    "coupling": (
        ["--couplings", "orth"],
        "--couplings: each name must be one of iid, orthogonal, simplex, hadamard, got 'orth' "
        "(did you mean 'orthogonal'?)",
    ),
    "features": (["--features", "64,-1"], "--features: must be whole numbers above 0 such as 64,128, got '64,-1'"),
    "odd": (["--features", "63"], "--features: hyperbolic needs even numbers, got 63"),
    "draws": (["--draws", "0"], "--draws: must be at least 1, got 0"),
    "steps": (["--steps", "0"], "--steps: must be at least 1, got 0"),
    "layers": (["--layers", "-1"], "--layers: must be at least 0 (all), got -1"),
    "seed": (["--seed", "-1"], "--seed: seed must be a whole number of at least 0, got -1"),
    "near": (
        ["--estimators", "trigonometric", "--near"],
        "--estimators: trigonometric features do not mix with near blocks; add --no-near",
    ),
    "output": (["--output", "FILE"], "--output FILE: is no folder that can be written (File exists)"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    assert main(["bench", "fidelity", *arguments]) == 2
    assert capsys.readouterr().err == f"subquad: error: {message}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of readers of the weights
def test_calibrated_and_learned_features_on_a_real_model() -> None:
    """AntiBERTy, two layers: what docs/accuracy.md says, with room for noise."""
    given = load_input("antiberty", layers=2, quick=True)
    plan = Plan(("positive", "balanced", "hedgehog"), ("orthogonal",), (128,), 2)
    found = {(bool(r.near), r.estimator): r.mean for r in measure(given, plan)}
    for near in (False, True):
        assert found[near, "hedgehog"] < found[near, "balanced"] < found[near, "positive"]
    assert found[True, "hedgehog"] < found[True, "window"]


# The script -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("real_heads")


def test_ratios_of_all_heads(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load_input", lambda *_, **__: tiny())
    monkeypatch.setattr(script, "FAVOR", 16)
    monkeypatch.setattr(script, "LEARNED", 8)
    report = script.heads("minilm", draws=2, steps=3)
    by = {(r["near"], r["estimator"]): r for r in report["records"]}
    assert (by[4, "hedgehog"]["num_features"], by[4, "positive"]["num_features"]) == (8, 16)
    for name, above, below in (
        ("calibrated / FAVOR+, alone", (0, "calibrated"), (0, "positive")),
        ("balanced / FAVOR+, near blocks and sinks", (4, "balanced"), (4, "positive")),
        ("learned / FAVOR+, near blocks and sinks", (4, "hedgehog"), (4, "positive")),
        ("learned / near blocks and sinks only", (4, "hedgehog"), (4, "window")),
    ):
        assert report["ratios"][name] == pytest.approx(by[above]["mean"] / by[below]["mean"], abs=1e-4)


def test_masks_of_the_whole_model(script: Any) -> None:
    """Residues alone are hidden, and accuracies are compared residue by residue."""
    ids = torch.tensor([[2, *range(5, 25), 3, 0, 0]]).repeat(50, 1)
    batch, hidden, before = script.hide({"input_ids": ids}, 4, 0, 1)
    assert torch.equal(before, ids)
    assert not hidden[:, [0, 21, 22, 23]].any()
    assert hidden[:, 1:21].double().mean() == pytest.approx(0.15, abs=0.03)
    assert torch.equal(batch["input_ids"] == 4, hidden)
    exact = {"right": torch.tensor([True, True, False, True])}
    found = script.difference(exact, {"right": torch.tensor([True, False, False, True])})
    assert found == pytest.approx({"points": -25.0, "points_se": 25.0})
