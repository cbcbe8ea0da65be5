"""Models whose layers mix mechanisms, ours and those of Hugging Face: scale, draws, reports, training, files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import subquad
from fitted import brief
from processes import OPTIONS, quiet_train
from subquad import ClusterAttention, LinformerAttention, Mechanism, errors
from subquad.cli import main
from subquad.conversion import swap_attention
from subquad.diagnostics.far_field import far_fields
from subquad.diagnostics.matrices import attention_matrices
from subquad.diagnostics.uniform import useless_layers
from subquad.features import names
from subquad.models import SubquadConfig, SubquadForCausalLM, SubquadForMaskedLM
from subquad.recording.layers import own_layers
from subquad.recording.record import Recording
from subquad.testing import assert_close
from tiny_heads import FAMILIES, gpt2, llama
from tiny_models import SMALL, TINY_RUN, favor_and_softmax, make, random_ids

FAVOR: dict[str, Any] = {"attention": "favor", "num_features": 8, "near": 4, "sinks": 1}
PARTS = favor_and_softmax(2)["parts"]


def mixed(*parts: dict[str, Any], **options: Any) -> Any:
    return make(attention="mixed", attention_options={"parts": list(parts)}, **{"dtype": torch.float32, **options})


def batches(count: int = 3) -> list[Tensor]:
    return [random_ids(2, 40 + i) for i in range(count)]


def kinds(model: Any) -> list[str]:
    return [module.name for module in model.modules() if isinstance(module, Mechanism)]


def key_heads(family: str) -> int:
    return 2 if family == "llama" else 4


def swapped(family: str, **options: Any) -> Any:
    return swap_attention(FAMILIES[family](**options), "mixed", **favor_and_softmax(key_heads(family)))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, **({} if model.config.model_type == "bert" else {"use_cache": False})).logits


# Swapped models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_that_see_all_exactly_change_nothing(family: str) -> None:
    """Scale, direction, key heads and padding reach every part."""
    every = [*range(key_heads(family))]
    exact = {"attention": "favor", "num_features": 8, "near": 16}
    parts = [{**exact, "heads": every[::2]}, {"attention": "softmax", "heads": every[1::2]}]
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        want = FAMILIES[family]()(ids, attention_mask=mask).logits
        got = swap_attention(FAMILIES[family](), "mixed", parts=parts)(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()])


def test_every_part_that_has_a_scale_gets_it() -> None:
    """Not the projection of `linear`; and what is given comes first."""
    parts = [
        {**FAVOR, "heads": [0]},
        {"attention": "softmax", "heads": [1], "scale": 0.9},
        {"attention": "linear", "heads": [2]},
        {"attention": "window", "heads": [3], "window": 4},
    ]
    model = swap_attention(gpt2(scale_attn_by_inverse_layer_idx=True), "mixed", parts=parts)
    made = [block.attn.subquad_attention.parts for block in model.transformer.h]
    assert [layer["favor0"].options.scale for layer in made] == [0.5, 0.25]
    assert [layer["softmax1"].scale for layer in made] == [0.9, 0.9]
    assert [layer["window3"].options.scale for layer in made] == [0.5, 0.25]
    assert model.config.attention_options == [{"parts": parts}] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swapped_model_comes_back(family: str, tmp_path: Path) -> None:
    model, ids = swapped(family), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["attention_options"] == [favor_and_softmax(key_heads(family))] * 2
    assert torch.equal(logits(subquad.load(tmp_path), ids), logits(model, ids))
    with torch.no_grad():
        plain = FAMILIES[family]()
        assert not torch.allclose(plain(ids).logits, logits(model, ids))


def test_layers_differ() -> None:
    options: list[dict[str, Any]] = [{"parts": [{"attention": "softmax", "heads": [0, 1]}]}, {"parts": PARTS}]
    made = kinds(swap_attention(llama(), "mixed", layer_options=options))
    assert made == ["mixed", "softmax", "mixed", "favor", "softmax"]
    made = kinds(swap_attention(llama(), ["favor", "mixed"], layer_options=[{}, {"parts": PARTS}]))
    assert made == ["favor", "mixed", "favor", "softmax"]


# Calibration ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["calibrated", "hedgehog"])
def test_parts_are_calibrated_and_come_back(estimator: str, tmp_path: Path) -> None:
    parts = [{"attention": "softmax", "heads": [1]}, {**FAVOR, "heads": [0, 2]}, {**FAVOR, "heads": [3], "near": 2}]
    model = mixed(*parts, num_key_value_heads=4)
    given = json.dumps(parts)
    report = subquad.calibrate(model, batches(), num_features=12, **brief(estimator, 3))
    assert [layer.name for layer in report.layers] == [
        f"model.layers.{layer}.attention.mechanism.parts.{part}" for layer in (0, 1) for part in ("favor1", "favor2")
    ]
    assert [len(layer.after) for layer in report.layers] == [2, 1, 2, 1]
    found = {"estimator": estimator, "num_features": 12} | ({"transform": True} if estimator == "calibrated" else {})
    noted = {"parts": [parts[0], {**parts[1], **found}, {**parts[2], **found}]}
    assert model.config.attention == ["mixed", "mixed"]
    assert model.config.attention_options == [noted, noted]
    assert json.dumps(parts) == given
    model.save_pretrained(tmp_path)
    again: Any = SubquadForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(2, 50)
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_parts_of_a_swapped_model_are_calibrated_and_come_back(family: str, tmp_path: Path) -> None:
    model = swapped(family).float()
    report = subquad.calibrate(model, [{"input_ids": ids, "use_cache": False} for ids in batches(2)])
    assert [layer.name.rpartition(".subquad_attention.")[2] for layer in report.layers] == ["parts.favor0"] * 2
    model.save_pretrained(tmp_path)
    again = subquad.load(tmp_path)
    assert again.config.attention_options[0]["parts"][0]["estimator"] == "calibrated"
    assert torch.equal(logits(again, random_ids(2, 30)), logits(model, random_ids(2, 30)))


def test_layers_are_counted_as_layers_whatever_is_in_them() -> None:
    """The options of a layer behind a mixed one stay its own."""
    options = [{"parts": PARTS}, {"num_features": 8, "near": 4}, {"feature_map": "relu"}]
    names = ["mixed", "favor", "linear"]
    model = make(attention=names, attention_options=options, num_hidden_layers=3, dtype=torch.float32)
    subquad.calibrate(model, batches(2))
    assert model.config.attention == names
    assert model.config.attention_options[0]["parts"][1] == PARTS[1]
    assert model.config.attention_options[1] == {**options[1], "estimator": "calibrated", "transform": True}
    assert model.config.attention_options[2] == options[2]
    assert [m.name for m in model.mechanisms()] == names


def test_estimators_of_parts_have_their_current_names() -> None:
    parts = [{"attention": "favor", "heads": [0], "estimator": "softmax"}, {"attention": "softmax", "heads": [1]}]
    names._warn.cache_clear()
    with pytest.warns(errors.RenamedWarning):
        config: Any = SubquadConfig(**SMALL, attention="mixed", attention_options={"parts": parts})
    assert config.attention_options == {"parts": [{**parts[0], "estimator": "hedgehog"}, parts[1]]}


# Diagnosis ------------------------------------------------------------------------------------------------------------


def test_reports_see_the_parts() -> None:
    model = mixed(*PARTS)
    where = "model.layers.0.attention.mechanism.parts."
    found = subquad.diagnose(model, batches(2), num_features=8, near=4)
    assert [layer.name for layer in found.layers][:2] == [where + "favor0", where + "softmax1"]
    assert [layer.own for layer in found.layers] == [True, False, True, False]
    assert [len(layer.heads) for layer in found.layers] == [2, 2, 2, 2]  # query heads
    assert found.layers[0].far_share is not None
    assert [field.name for field in far_fields(model, batches(1))] == [
        f"model.layers.{layer}.attention.mechanism.parts.favor0" for layer in (0, 1)
    ]


def test_what_is_kept_of_a_part_holds_no_other_heads() -> None:
    """Or a budget of memory would be overrun by as much as there are other heads."""
    model = mixed({**FAVOR, "heads": [0]}, {"attention": "softmax", "heads": [1, 2, 3]}, num_key_value_heads=4)
    favor, softmax, *_ = Recording(model, batches(1), op="test", exact=True)
    for layer, heads in ((favor, 1), (softmax, 3)):
        (call,) = layer.calls
        held = [x.untyped_storage().nbytes() for x in (call.q, call.k, call.v, call.output) if x is not None]
        assert held == [2 * heads * 40 * 4 * 4] * 4
        assert sum(held) == call.nbytes


def test_useless_features_of_parts_are_noticed() -> None:
    model = mixed({**FAVOR, "heads": [0], "near": 0, "sinks": 0}, {"attention": "softmax", "heads": [1]})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attention.q_proj.weight *= 8
    assert useless_layers(model, random_ids(2, 60), rows=30)[0].name.endswith(".parts.favor0")


def test_a_layer_has_one_matrix() -> None:
    model, ids = mixed(*PARTS), random_ids(1, 12)
    found = attention_matrices(model, {"input_ids": ids})
    assert [matrix.shape for matrix in found] == [(4, 12, 12)] * 2
    assert [layer.name for layer in own_layers(model, Mechanism)] == [
        f"model.layers.{layer}.attention.mechanism" for layer in (0, 1)
    ]


# Draws, centroids, shared projections ---------------------------------------------------------------------------------


def test_redraw_reaches_every_part() -> None:
    parts = [{**FAVOR, "heads": [0]}, {**FAVOR, "heads": [2, 3]}, {"attention": "softmax", "heads": [1]}]
    model = mixed(*parts, num_key_value_heads=4)
    buffers = {name: x for name, x in model.named_buffers() if name.endswith("features.weight")}
    before = {name: x.clone() for name, x in buffers.items()}
    assert model.redraw(5) == len(buffers) == 4
    assert not any(torch.equal(x, before[name]) for name, x in buffers.items())
    assert len({tuple(matrix.flatten().tolist()) for x in buffers.values() for matrix in x}) == 6
    assert mixed({"attention": "softmax", "heads": [0, 1]}).redraw(1) == 0


def test_centroids_of_parts_move_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    update = ClusterAttention.update

    def counted(self: Any, q: Tensor, *rest: Any) -> None:
        moved.append(q.shape[1])
        update(self, q, *rest)

    monkeypatch.setattr(ClusterAttention, "update", counted)
    parts = [{"attention": "softmax", "heads": [0]}, {"attention": "cluster", "heads": [1], "num_clusters": 2}]
    options = replace(OPTIONS, attention="mixed", attention_options={"parts": parts}, redraw_every=0)
    quiet_train(tmp_path, replace(options, steps=2, save_every=2, eval_every=2, log_every=1))
    assert moved == [1] * 4  # steps and layers; the heads of the part alone


def test_a_projection_for_all_layers_is_shared_by_parts_too(tmp_path: Path) -> None:
    linformer = {"attention": "linformer", "heads": [0], "rank": 4, "sharing": "layerwise"}
    parts = [{"attention": "softmax", "heads": [1]}, linformer]
    alone = {name: value for name, value in linformer.items() if name not in ("attention", "heads")}
    options: dict[str, Any] = {
        "attention": ["mixed", "linformer", "mixed"],
        "attention_options": [
            {"parts": parts},
            alone,
            {"parts": [{**linformer, "heads": [1]}, {**FAVOR, "heads": [0]}]},
        ],
        "num_hidden_layers": 3,
        "max_position_embeddings": 40,
        "dtype": torch.float32,
    }
    model = make(SubquadForMaskedLM, **options)
    made = [module for module in model.modules() if isinstance(module, LinformerAttention)]
    assert len(made) == 3
    assert all(m.e is made[0].e for m in made)
    model.save_pretrained(tmp_path)
    again, ids = SubquadForMaskedLM.from_pretrained(tmp_path), random_ids(2, 30)
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(errors.ConfigError) as caught:
        make(SubquadForCausalLM, **options)
    assert str(caught.value) == (
        "SubquadForCausalLM: mixed cannot be causal, its projections mix the keys of all positions "
        "(linformer1 on [0]); use SubquadForMaskedLM (objective='masked') or another attention"
    )


# Training -------------------------------------------------------------------------------------------------------------


def test_fine_tuning_with_other_parts_keeps_the_new_ones(tmp_path: Path) -> None:
    """Same parts on the same heads go on with their features."""
    plain = replace(OPTIONS, attention="mixed", attention_options={"parts": PARTS}, redraw_every=0, dropout=0.0)
    plain = replace(plain, steps=2, save_every=2, eval_every=2, log_every=1)
    quiet_train(tmp_path / "base", plain)
    tuned = replace(plain, init=str(tmp_path / "base"), learning_rate=1e-12, warmup=0, seed=1)
    turned = [{**PARTS[0], "heads": [1]}, {**PARTS[1], "heads": [0]}]
    quiet_train(tmp_path / "same", tuned)
    quiet_train(tmp_path / "other", replace(tuned, attention_options={"parts": turned}))
    base, same, other = (
        SubquadForCausalLM.from_pretrained(tmp_path / n / "model").state_dict() for n in ("base", "same", "other")
    )
    features = [name for name in base if "mechanism" in name]
    assert features
    for name, tensor in base.items():
        assert_close(same[name], tensor, 1e-6, name)
        if name not in features:
            assert_close(other[name], tensor, 1e-6, name)
    assert not any(torch.equal(other[name], base[name]) for name in features)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "protein", "--attention", "mixed", *TINY_RUN, "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert "mixed: needs parts, which say what each key head has, such as parts=[" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_with_its_parts(tmp_path: Path) -> None:
    option = "--option=parts=" + json.dumps(PARTS)
    command = ["train", "protein", "--attention", "mixed", option, *TINY_RUN, "--out", str(tmp_path / "run")]
    assert main([*command, "--steps", "2", "--save-every", "1"]) == 0
    assert main([*command, "--steps", "2", "--save-every", "1", "--resume"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.attention_options == {"parts": PARTS}
