"""Calibrated models are saved and come back as they were; the command that makes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fitted import brief
from subquad import FavorAttention, calibrate, errors
from subquad.cli import main
from subquad.data import load_proteins, read_fasta
from subquad.models import SubquadForCausalLM, SubquadForMaskedLM, SubquadModel
from tiny_models import make, random_ids

TINY = ["--window", "64", "--layers", "2", "--hidden", "16", "--heads", "4", "--eval-samples", "2", "--threads", "1"]
OPTIONS: dict[str, Any] = {"near": 4, "sinks": 2, "num_features": 16}


def calibrated(kind: Any = SubquadForCausalLM, estimator: str = "calibrated", **how: Any) -> Any:
    """With fewer key heads than query heads."""
    model = make(kind, torch.float32, attention_options=OPTIONS)
    ids = random_ids(6, 40)
    calibrate(model, [ids[:4], ids[4:]], **brief(estimator, 3), **how)
    return model


def reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    again, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return again


# Saved and loaded; a warning that features are not calibrated would be an error here ----------------------------------


@pytest.mark.parametrize("estimator", ["calibrated", "sharp", "optimal", "hedgehog", "exponential"])
@pytest.mark.parametrize("kind", [SubquadModel, SubquadForCausalLM, SubquadForMaskedLM])
def test_saved_models_come_back(kind: Any, estimator: str, tmp_path: Path) -> None:
    model, ids = calibrated(kind, estimator), random_ids(2, 50)
    again = reloaded(model, tmp_path)
    assert torch.equal(again(ids)[0], model(ids)[0])
    mechanism = again.mechanisms()[1]
    assert (mechanism.estimator, mechanism.num_heads, len(mechanism.feature_map.query)) == (estimator, 2, 2)


@pytest.mark.parametrize("estimator", ["calibrated", "hedgehog"])
def test_each_layer_its_own_number_of_features(estimator: str, tmp_path: Path) -> None:
    """The second layer attends more evenly than the first, so fewer features do."""
    model = make(SubquadForCausalLM, torch.float32, attention_options=OPTIONS)
    with torch.no_grad():
        for block, size in zip(model.model.layers, (1.0, 0.2), strict=True):
            block.attention.q_proj.weight *= size
    ids = random_ids(6, 40)
    report = calibrate(model, [ids[:4], ids[4:]], num_features="auto", target=0.3, **brief(estimator, 40))
    counts = [layer.num_features for layer in report.layers]
    assert counts[0] > counts[1]
    assert [options["num_features"] for options in model.config.attention_options] == counts
    again = reloaded(model, tmp_path)
    assert [m.num_features for m in again.mechanisms()] == counts
    assert torch.equal(again(ids)[0], model(ids)[0])


def test_other_layers_keep_their_options(tmp_path: Path) -> None:
    mixed = [{"feature_map": "relu"}, {**OPTIONS, "coupling": "iid"}, {}]
    options = {"attention": ["linear", "favor", "softmax"], "attention_options": mixed, "num_hidden_layers": 3}
    model, ids = make(SubquadForCausalLM, torch.float32, **options), random_ids(2, 40)
    calibrate(model, [ids])
    assert model.config.attention == ["linear", "favor", "softmax"]
    assert model.config.attention_options == [mixed[0], {**mixed[1], "estimator": "calibrated", "transform": True}, {}]
    assert torch.equal(reloaded(model, tmp_path)(ids)[0], model(ids)[0])


def test_a_transform_comes_back_and_can_go_again(tmp_path: Path) -> None:
    model, ids = calibrated(transform=True), random_ids(2, 50)
    assert [options["transform"] for options in model.config.attention_options] == [True, True]
    assert torch.equal(reloaded(model, tmp_path / "a")(ids)[0], model(ids)[0])
    calibrate(model, [ids], estimator="hedgehog", steps=1)
    assert not any("transform" in options for options in model.config.attention_options)
    assert torch.equal(reloaded(model, tmp_path / "b")(ids)[0], model(ids)[0])


def test_redrawn_models_stay_calibrated(tmp_path: Path) -> None:
    model, ids = calibrated(), random_ids(2, 50)
    before = model(ids)[0]
    again = reloaded(model, tmp_path)
    for one in (model, again):
        one.redraw(7)
    assert torch.equal(again(ids)[0], model(ids)[0])
    assert not torch.equal(model(ids)[0], before)


def test_learned_maps_of_a_fresh_model_belong_to_heads() -> None:
    """As drawn ones do: one map for each key head, and others in each layer."""
    model = make(attention_options={**OPTIONS, "estimator": "hedgehog"})
    first, second = (mechanism.features.query for mechanism in model.mechanisms())
    assert first.shape == (2, 8, 4)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_any_precision_can_be_calibrated(dtype: torch.dtype) -> None:
    model, ids = make(SubquadModel, dtype, attention_options=OPTIONS), random_ids(2, 40)
    for estimator in ("calibrated", "exponential"):
        report = calibrate(model, [ids], **brief(estimator))
        assert all(0 < error < 3 for layer in report.layers for error in layer.after)


@pytest.mark.parametrize("estimator", ["calibrated", "hedgehog"])
def test_half_precision_is_fitted_in_float32(estimator: str) -> None:
    """The same numbers give the same features, whatever they are stored in."""
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    fitted = []
    for dtype in (torch.bfloat16, torch.float32):
        layer = FavorAttention(8, 16, near=4)
        calibrate(layer, [(q.to(dtype), k.to(dtype), v.to(dtype))], **brief(estimator))
        fitted.append(layer.feature_map.query)
    assert torch.equal(*fitted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("near", "sinks"), [(0, 0), (0, 5), (4, 0), (4, 3), (4, 4), (4, 9), (1, 3)])
def test_the_longest_sequence_that_is_all_exact(near: int, sinks: int, causal: bool) -> None:
    from subquad.checks.calibration import all_exact

    attention = FavorAttention(4, 4, near=near, sinks=sinks)
    for length in (1, *range(2, 25)):
        places = torch.arange(length)[None]
        far = ~attention.exact_pairs(places, places)[0, 0]
        assert bool((far.tril() if causal else far).any()) == (length > all_exact(attention.options, causal))


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = ["--option", "num_features=8", "--option", "near=8"]
    for name, how in (("favor", options), ("linear", ["--attention", "linear"])):
        assert main(["train", "protein", "--out", str(folder / name), "--steps", "1", *TINY, *how]) == 0
    records = list(read_fasta(Path(str(load_proteins.__globals__["SAMPLE"]))))[:6]
    (folder / "some.fasta").write_text("".join(f">{name}\n{sequence[:150]}\n" for name, sequence in records))
    (folder / "short.fasta").write_text(">a\nMKV\n")
    return {name: folder / name for name in ("favor", "linear", "some.fasta", "short.fasta")}


@pytest.mark.parametrize(
    "arguments", [[], ["--estimator", "hedgehog", "--features", "6", "--steps", "2"]], ids=["drawn", "learned"]
)
def test_the_command_makes_a_model_for_the_others(
    arguments: list[str], runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fasta = tmp_path / "new" / "model", str(runs["some.fasta"])
    assert main(["calibrate", str(runs["favor"]), fasta, *arguments, "--num", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    estimator, features = ("hedgehog", 6) if arguments else ("calibrated", 8)
    assert shown.out.startswith(f"estimator={estimator!r}; relative error of the outputs on ")
    assert shown.err.splitlines()[-1] == f"the calibrated model is in {out}"
    config = json.loads((out / "config.json").read_text())
    assert [o["estimator"] for o in config["attention_options"]] == [estimator] * 2
    assert [o["num_features"] for o in config["attention_options"]] == [features] * 2
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]
    assert main(["score", str(out), fasta]) == 0
    assert main(["generate", str(out), "--length", "5"]) == 0
    assert main(["embed", str(out), fasta, "--output", str(tmp_path / "v.npz")]) == 0
    assert main(["diagnose", str(out), fasta, "--num", "2"]) == 0
    assert "UncalibratedWarning" not in capsys.readouterr().err


def test_the_command_finds_the_number_of_features(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    command = ["calibrate", str(runs["favor"]), str(runs["some.fasta"]), "--features", "auto", "--out", str(out)]
    assert main([*command, "--target", "0.9", "--cap", "64"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert all(options["num_features"] in (32, 64) for options in config["attention_options"])


MISTAKES: dict[str, tuple[list[str], str]] = {
    "features": (["--features", "many"], "--features: must be a whole number of at least 1, or auto, got 'many'"),
    "no features": (["--features", "0"], "--features: must be a whole number of at least 1, or auto, got '0'"),
    "steps": (
        ["--estimator", "hedgehog", "--steps", "0"],
        "calibrate: steps must be a whole number of at least 1, got 0",
    ),
    "unused": (["--cap", "9"], "calibrate: cap is for num_features='auto'; leave it out"),
    "length": (["--length", "0"], "--length: must be at least 1, got 0"),
    "num": (["--num", "0"], "--num: must be at least 1, got 0"),
    "estimator": (
        ["--estimator", "positive"],
        "calibrate: estimator must be one of optimal, sharp, calibrated, hedgehog, exponential, got 'positive'",
    ),
    "short": (
        ["--length", "10"],
        "calibrate: with near=8 and sinks=4 a sequence of 10 tokens is all exact, there is nothing to estimate; give "
        "longer sequences",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_leave_nothing_behind(
    arguments: list[str], message: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", str(runs["favor"]), str(runs["some.fasta"]), "--out", str(tmp_path / "model"), *arguments]
    assert main(command) == 2
    assert capsys.readouterr().err.splitlines() == [f"subquad: error: {message}"]
    assert not list(tmp_path.iterdir())


def test_targets_out_of_reach_leave_nothing_behind(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", str(runs["favor"]), str(runs["some.fasta"]), "--features", "auto", "--cap", "2"]
    assert main([*command, "--target", "0.0001", "--out", str(tmp_path / "model")]) == 2
    assert "2 of 2 layers do not reach target=0.0001 with up to 2 features" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("dear")
    command = ["calibrate", str(runs["favor"]), str(runs["some.fasta"]), "--out", str(tmp_path / "model")]
    assert main(command) == 2
    want = f"subquad: error: --out {tmp_path / 'model'}: exists already; give another name"
    assert capsys.readouterr().err.splitlines() == [want]
    assert (tmp_path / "model" / "mine").read_text() == "dear"


def test_a_failed_write_leaves_nothing_behind(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("subquad.files._sync", fail)
    out = tmp_path / "model"
    command = ["calibrate", str(runs["favor"]), str(runs["some.fasta"]), "--num", "2", "--out", str(out)]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        f"subquad: error: {out}: cannot be written (No space left on device); nothing was lost"
    ]
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


def test_models_without_features(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["calibrate", str(runs["linear"]), str(runs["some.fasta"]), "--out", str(tmp_path / "model")]
    assert main(command) == 2
    want = "subquad: error: calibrate: SubquadForCausalLM has no favor or softmax attention"
    assert capsys.readouterr().err.splitlines() == [want]


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    return str(caught.value)


def test_exact_models_have_nothing_to_calibrate() -> None:
    model = make(attention="softmax")
    assert raised(lambda: calibrate(model, [random_ids(1, 9)])) == (
        "calibrate: SubquadForCausalLM has no FavorAttention; there is nothing to calibrate"
    )
