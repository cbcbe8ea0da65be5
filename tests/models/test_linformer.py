"""Linformer in layers and Hugging Face models: who shares which projection, saving, training, lengths."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from subquad import LinformerAttention, errors
from subquad.cli import main
from subquad.models import (
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadModel,
    modeling,
)
from subquad.nn import MultiheadAttention
from subquad.testing import assert_close
from tiny_models import SMALL, make, random_ids

MATRICES = {"none": 288, "headwise": 24, "key_value": 12, "layerwise": 1}  # of 12 layers with 12 heads (the paper, 4)
SHARINGS = pytest.mark.parametrize("sharing", MATRICES)


def masked(sharing: str = "headwise", kind: Any = SubquadForMaskedLM, **options: Any) -> Any:
    chosen = {"rank": 4, "sharing": sharing, **options.pop("attention_options", {})}
    small = {"max_position_embeddings": 40, "dtype": torch.float32, **options}
    return make(kind, attention="linformer", attention_options=chosen, **small)


def projections(model: Any) -> dict[int, Tensor]:
    """The matrices of all mechanisms, by where they are in memory."""
    found = [p for m in model.mechanisms() for p in m.parameters()]
    return {matrix.data_ptr(): matrix for p in found for matrix in p.detach()}


@SHARINGS
@pytest.mark.parametrize("tied", [True, False])
def test_number_of_projections(sharing: str, tied: bool) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": None}
    model = masked(sharing, hidden_size=24, tie_word_embeddings=tied, **sizes)
    assert len(projections(model)) == MATRICES[sharing]
    learned = sum(p.numel() for name, p in model.named_parameters() if ".mechanism." in name)
    assert learned == MATRICES[sharing] * 4 * 40


@SHARINGS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("projection", ["learned", "convolution"])
def test_saved_models_come_back_with_what_they_share(sharing: str, tied: bool, projection: str, tmp_path: Path) -> None:
    options = {"projection": projection}
    model = masked(sharing, attention_options=options, num_hidden_layers=3, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = [name for name in file.keys() if ".mechanism." in name]  # noqa: SIM118, it is no dict
    assert len(stored) == {"none": 6, "headwise": 6, "key_value": 3, "layerwise": 1}[sharing]
    again, report = cast(Any, SubquadForMaskedLM).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert len(projections(again)) == len(projections(model))
    ids = random_ids(2, 30)
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = SubquadModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    low = SubquadForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert low(ids).logits.dtype == torch.bfloat16


def test_models_begin_with_projections_of_the_right_size() -> None:
    """transformers initialises what it knows; it must neither skip nor shrink ours."""
    for sharing in MATRICES:
        for matrix in projections(masked(sharing, attention_options={"max_length": 400, "rank": 20})).values():
            assert abs(float(matrix.std()) * 400**0.5 - 1) < 0.05


def test_layers_share_one_matrix_and_its_gradient() -> None:
    model, ids = masked("layerwise", dtype=torch.float64).train(), random_ids(2, 30)
    first, second = (m for m in model.mechanisms() if isinstance(m, LinformerAttention))
    assert first.e is second.e
    assert first.e is not None
    model(ids, labels=ids).loss.backward()
    together = first.e.grad
    assert together is not None
    parts = []
    for layer in (first, second):  # the same model, whose layers have a copy each
        copy = torch.nn.Parameter(first.e.detach().clone())
        layer.e = copy
        parts.append(copy)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert_close(together, torch.stack([cast(Tensor, part.grad) for part in parts]).sum(0), 1e-12)


@SHARINGS
def test_reversible_layers_have_the_gradients_of_plain_ones(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(x1: Tensor, x2: Tensor, blocks: Any, context: Any) -> tuple[Tensor, Tensor]:
        for block in blocks:
            x1 = x1 + block.attend(x2, context)
            x2 = x2 + block.transform(x1)
        return x1, x2

    ids, grads = random_ids(2, 30), []
    for replace in (False, True):
        if replace:
            monkeypatch.setattr(modeling, "reversible", plain)
        model = masked(sharing, dtype=torch.float64, reversible=True).train()
        model(ids, labels=ids).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, got in grads[0].items():
        assert_close(got, grads[1][name], 1e-9, name)


def test_length_comes_from_the_config_unless_given() -> None:
    assert [m.max_length for m in masked().mechanisms()] == [40, 40]
    longer = masked(attention_options={"max_length": 64})
    assert [m.max_length for m in longer.mechanisms()] == [64, 64]
    with pytest.raises(errors.ShapeError, match="made for at most max_length=40 keys, got 41"):
        masked()(random_ids(1, 41))
    with pytest.raises(errors.ConfigError, match="linformer: needs max_length"):
        MultiheadAttention(16, 4, attention="linformer")
    layer = MultiheadAttention(16, 4, batch_first=True, attention="linformer", rank=4, max_length=20, sharing="none")
    assert layer.mechanism.get_parameter("e").shape == (4, 4, 20)
    assert layer(*torch.randn(3, 2, 20, 16))[0].shape == (2, 20, 16)


def test_right_padding_changes_nothing_in_a_model() -> None:
    model = masked("none", kind=SubquadForSequenceClassification, dtype=torch.float64, num_labels=3)
    ids = random_ids(2, 30)
    mask = (torch.arange(30) < torch.tensor([[30], [11]])).long()
    together = model(ids, attention_mask=mask).logits
    assert_close(together[1:], model(ids[1:, :11]).logits, 1e-9)
    with pytest.raises(errors.MaskError, match="may pad on the right only"):
        model(ids, attention_mask=mask.flip(1))


def test_gaussian_projections_differ_between_layers_and_are_saved(tmp_path: Path) -> None:
    model = masked("headwise", attention_options={"projection": "gaussian"})
    first, second = model.mechanisms()
    assert not torch.equal(first.weight, second.weight)
    assert model.redraw(7) == 2
    model.save_pretrained(tmp_path)
    again = SubquadForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(random_ids(1, 30)).logits, model(random_ids(1, 30)).logits)


def test_layers_that_cannot_share_say_so() -> None:
    options = [{"rank": rank, "sharing": "layerwise"} for rank in (4, 5)]
    config = SubquadConfig(
        **SMALL, num_hidden_layers=2, attention="linformer", attention_options=options, max_position_embeddings=40
    )
    with pytest.raises(errors.ConfigError) as raised:
        SubquadModel(config)
    assert str(raised.value) == (
        "subquad model: layers.1.attention.mechanism.e is to be layers.0.attention.mechanism.e, but has the shape "
        "[1, 5, 40] instead of [1, 4, 40]; give all layers that share it the same attention_options"
    )


def test_layers_between_others_share_too() -> None:
    names = ["linformer", "softmax", "linformer"]
    options = [{"rank": 4, "sharing": "layerwise"}, {}, {"rank": 4, "sharing": "layerwise"}]
    model = make(SubquadModel, num_hidden_layers=3, attention=names, attention_options=options)
    assert len(projections(model)) == 1


def test_causal_models_refuse() -> None:
    with pytest.raises(errors.ConfigError) as raised:
        masked(kind=SubquadForCausalLM)
    assert str(raised.value) == (
        "SubquadForCausalLM: linformer cannot be causal, its projections mix the keys of all positions; "
        "use SubquadForMaskedLM (objective='masked') or another attention"
    )


def test_training_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["train", "protein", "--attention", "linformer", "--window", "64", "--layers", "2", "--hidden", "16"]
    command += ["--heads", "2", "--steps", "2", "--eval-samples", "2", "--threads", "1", "--out", str(out)]
    command += ["--option", "rank=8", "--option", "sharing=layerwise"]
    assert main(command) == 2
    assert "linformer cannot be causal" in capsys.readouterr().err.replace("\n", " ")
    assert not (out / "metrics.jsonl").exists()
    assert main([*command, "--objective", "masked", "--layout", "crops"]) == 0
    model = SubquadForMaskedLM.from_pretrained(out / "model")
    assert len(projections(model)) == 1
    assert model.mechanisms()[0].get_parameter("e").shape == (1, 8, 64)


def test_scripts_in_miniature(tmp_path: Path) -> None:
    small = {
        "linformer_rank": ["--ranks", "8", "16", "--draws", "2"],
        "linformer_kernels": ["--length", "64", "--rank", "16", "--repeats", "1", "--skip-exact"],
    }
    for name, arguments in small.items():
        script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
        command = [sys.executable, str(script), *arguments, "--output", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / f"{name}.json").read_text())
    assert (tmp_path / "linformer_rank.png").exists()
