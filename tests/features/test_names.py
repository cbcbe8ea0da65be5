"""Words of earlier versions: `estimator="softmax"` is "hedgehog", with one warning and the same bits."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import OPTIONS, quiet_train, weights
from subquad import FavorAttention, attention, calibrate
from subquad.cli import main
from subquad.conversion import swap_attention
from subquad.errors import ConfigError, RenamedWarning
from subquad.features import names
from subquad.features.names import current_options
from subquad.models import SubquadConfig
from subquad.training import TrainOptions
from subquad.training.checksums import read_record, write_record
from subquad.training.options import RunRecord
from tiny_hugging_face import bert
from tiny_models import make, random_ids

TEXT = "favor: estimator='softmax' is called 'hedgehog' now; the old name still works and means the same"
OLD: dict[str, Any] = {"near": 4, "num_features": 8, "estimator": "softmax"}
NEW: dict[str, Any] = {**OLD, "estimator": "hedgehog"}
RUN = replace(OPTIONS, attention_options=NEW, steps=2, eval_every=2, redraw_every=0)


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """The warning comes once in a process; here, once in a test."""
    names._warn.cache_clear()
    yield
    names._warn.cache_clear()


class OneWarning:
    """Exactly one warning, of this text."""

    def __enter__(self) -> None:
        self.catching = warnings.catch_warnings(record=True)
        self.caught = self.catching.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, *error: Any) -> None:
        self.catching.__exit__(*error)
        if error[0] is None:
            assert [(w.category, str(w.message)) for w in self.caught] == [(RenamedWarning, TEXT)]


def former_config(folder: Path) -> None:
    """A saved model as an earlier version left it."""
    path = folder / "config.json"
    text = path.read_text()
    assert text.count('"hedgehog"') > 0
    path.write_text(text.replace('"hedgehog"', '"softmax"'))


# Layers ---------------------------------------------------------------------------------------------------------------


def test_a_layer() -> None:
    with OneWarning():
        layers = [FavorAttention(8, **OLD), attention("favor", head_dim=8, **OLD)]
    new = FavorAttention(8, **NEW)
    q, k, v = torch.randn(3, 1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        assert layer.estimator == "hedgehog"
        assert repr(layer) == repr(new)
        assert torch.equal(layer(q, k, v, causal=True), new(q, k, v, causal=True))
    assert list(new.state_dict()) == [f"features.{x}" for x in ("query", "key", "offset_weight", "offset_bias")]


def test_features_of_another_kind() -> None:
    layer = FavorAttention(8, 16)
    with OneWarning():
        layer.set_features("softmax", 16, None)
    assert layer.estimator == "hedgehog"


@pytest.mark.parametrize("value", ["sofmax", ["softmax"], None, 3])
def test_other_words_are_refused_as_before(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^favor: estimator must be one of positive, "):
        FavorAttention(8, estimator=value)
    with pytest.raises(ConfigError, match=r"^calibrate: estimator must be one of optimal, "):
        calibrate(FavorAttention(8), [], estimator=value)


def test_swapped_attention_warns_once_not_per_layer() -> None:
    with OneWarning():
        model = swap_attention(bert(), "favor", **OLD)
    assert [m.estimator for m in model.modules() if isinstance(m, FavorAttention)] == ["hedgehog"] * 3


def test_calibrate() -> None:
    q, k, v = torch.randn(3, 2, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    fitted = []
    for word in ("hedgehog", "softmax"):
        layer = FavorAttention(8, 16, near=4)
        if word == "hedgehog":
            report = calibrate(layer, [(q, k, v)], estimator=word, steps=2, progress=False)
        else:
            with OneWarning():
                report = calibrate(layer, [(q, k, v)], estimator=word, steps=2, progress=False)
        assert (layer.estimator, report.estimator) == ("hedgehog", "hedgehog")
        fitted.append(layer.state_dict())
    assert all(torch.equal(fitted[0][name], fitted[1][name]) for name in fitted[0])


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["one for all layers", "one for each"])
def test_a_config(many: bool, tmp_path: Path) -> None:
    given = [dict(OLD), dict(OLD)] if many else dict(OLD)
    with OneWarning():
        config = SubquadConfig(num_hidden_layers=2, attention_options=given)
    assert config.attention_options == ([NEW, NEW] if many else NEW)
    assert given == ([OLD, OLD] if many else OLD)  # the caller's own stay as they are
    config.save_pretrained(tmp_path)
    assert "softmax" not in (tmp_path / "config.json").read_text()


def test_a_model_that_was_saved_before(tmp_path: Path) -> None:
    model, ids = make(dtype=torch.float32, attention_options=NEW), random_ids(2, 40)
    model.save_pretrained(tmp_path / "old")
    former_config(tmp_path / "old")
    with OneWarning():
        again, report = type(model).from_pretrained(tmp_path / "old", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert [mechanism.estimator for mechanism in again.mechanisms()] == ["hedgehog"] * 2
    again.save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["attention_options"] == NEW


@pytest.mark.parametrize(
    "options", [None, {}, {"near": 3}, [{}, {"estimator": "positive"}], {"estimator": ["softmax"]}]
)
def test_options_without_the_word_stay_as_they_are(options: Any) -> None:
    assert current_options(options) == options


# Runs and commands ----------------------------------------------------------------------------------------------------


def test_a_run_that_was_begun_before(tmp_path: Path) -> None:
    quiet_train(tmp_path / "whole", RUN)
    quiet_train(tmp_path / "old", RUN)
    record = tmp_path / "old" / "run.json"
    stored = read_record(record)
    stored["options"]["attention_options"] = OLD
    write_record(record, stored)
    (tmp_path / "old" / "summary.json").unlink()  # not finished: the model is made again from the last checkpoint
    with OneWarning():
        loaded = RunRecord.load(tmp_path / "old")
        assert loaded is not None
        assert loaded.options == RUN
        assert TrainOptions(attention_options=OLD).attention_options == NEW
        quiet_train(tmp_path / "old", RUN, resume=True)
    assert weights(tmp_path / "old") == weights(tmp_path / "whole")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--inputs", "small", "--quick", "--features", "8", "--draws", "1", "--steps", "1", "--near"]
    estimators = ["--estimators", "positive, softmax", "--couplings", "iid", "--output", str(tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["bench", "fidelity", *sizes, *estimators]) == 0
    assert capsys.readouterr().err.splitlines().count(f"subquad: warning: {TEXT}") == 1
    report = json.loads((tmp_path / "fidelity.json").read_text())
    assert {"positive", "hedgehog"} <= {record["estimator"] for record in report["records"]}
