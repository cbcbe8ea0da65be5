"""Swapped models on disk, and what comes back."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import subquad
from subquad import errors
from subquad.conversion import swap_attention
from tiny_heads import FAMILIES, bert, llama
from tiny_models import random_ids

MIXED: dict[str, Any] = {"layer_options": [{"num_features": 8, "near": 4}, {}]}


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, **({} if model.config.model_type == "bert" else {"use_cache": False})).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swapped_model_comes_back_as_itself(family: str, tmp_path: Path) -> None:
    model, ids = swap_attention(FAMILIES[family](), ["favor", "softmax"], **MIXED), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    for again in (subquad.load(tmp_path), auto.from_pretrained(tmp_path)):
        assert type(again) is type(model)
        assert again.dtype == torch.float64
        assert not again.training
        assert torch.equal(logits(again, ids), logits(model, ids))
    body: Any = AutoModel.from_pretrained(tmp_path)
    assert type(body) is type(model.base_model)
    assert torch.equal(body(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    subquad.load(tmp_path).save_pretrained(tmp_path / "again")
    assert torch.equal(logits(subquad.load(tmp_path / "again"), ids), logits(model, ids))
    assert subquad.load(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_of_transformers_refuses_the_folder(family: str, tmp_path: Path) -> None:
    model = swap_attention(FAMILIES[family](), "favor", num_features=8)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"load it with subquad\.load"):
        type(model).from_pretrained(tmp_path)


PLAIN = """
import sys
from transformers import AutoModelForCausalLM
{first}
try:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print(model.model.layers[0].self_attn.subquad_attention.name)
except ValueError as error:
    print("refused" if "subquad_converted" in str(error) else error)
"""


@pytest.mark.parametrize(("first", "printed"), [("", "refused"), ("import subquad.conversion", "favor")])
def test_in_another_process(first: str, printed: str, tmp_path: Path) -> None:
    swap_attention(llama(), "favor", num_features=8).save_pretrained(tmp_path)
    command = [sys.executable, "-c", PLAIN.format(first=first), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == printed, done.stderr


def test_what_calibration_found_comes_back(tmp_path: Path) -> None:
    model = swap_attention(bert(attention_probs_dropout_prob=0.0).float(), "favor", num_features=16, near=0, sinks=0)
    batches = [{"input_ids": random_ids(2, 30 + i)} for i in range(3)]
    subquad.calibrate(model, batches, estimator="hedgehog", num_features=8, steps=2)
    model.eval().save_pretrained(tmp_path)
    again = subquad.load(tmp_path)
    mechanism = again.bert.encoder.layer[1].attention.self.subquad_attention
    assert (mechanism.estimator, mechanism.num_features) == ("hedgehog", 8)
    assert torch.equal(logits(again, batches[0]["input_ids"]), logits(model, batches[0]["input_ids"]))


def test_swapping_again_is_what_is_saved(tmp_path: Path) -> None:
    model = swap_attention(swap_attention(llama(), "favor", num_features=8), "window", window=4)
    model.save_pretrained(tmp_path)
    assert subquad.load(tmp_path).config.attention == ["window", "window"]


def test_configurations_are_copied_and_pickled() -> None:
    config = swap_attention(llama(), "favor", num_features=8).config
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config)
        assert again.to_dict() == config.to_dict()
        assert again.layer_attention(1) == ("favor", {"num_features": 8})


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_mistakes(tmp_path: Path) -> None:
    def message(call: Any) -> str:
        with pytest.raises((errors.ConfigError, errors.CheckpointError)) as caught:
            call()
        return str(caught.value)

    nothing, other, saved = (tmp_path / name for name in ("nothing", "other", "saved"))
    assert message(lambda: subquad.load(nothing)) == f"{nothing}: has no config.json, so it is no saved model"
    llama().save_pretrained(other)
    assert message(lambda: subquad.load(other)) == (
        f"{other}: is a model of type 'llama', not one whose attention was swapped; load it with transformers"
    )
    (other / "config.json").write_text("[")
    assert message(lambda: subquad.load(other)).startswith(f"{other}: its config.json cannot be read (")
    swap_attention(llama(), "favor", num_features=8).save_pretrained(saved)
    assert message(lambda: AutoModelForMaskedLM.from_pretrained(saved)) == (
        "AutoModelForMaskedLM: llama has no such model"
    )
    changed(saved, architectures=["os"])
    assert message(lambda: subquad.load(saved)) == (
        f"{saved}: its config.json names no class of transformers (architectures: 'os')"
    )
    changed(saved, base=None)
    assert message(lambda: AutoModelForCausalLM.from_pretrained(saved)) == (
        "a converted model must say in its config.json which model it was (base_type, base)"
    )
