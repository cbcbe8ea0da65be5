"""Hugging Face models with our attention in them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaForCausalLM,
    T5Config,
    T5Model,
)

import subquad
from subquad import errors
from subquad.conversion import swap_attention
from subquad.conversion.swap import module_scale, scaling
from tiny_heads import FAMILIES, SIZES, bert, gpt2, llama
from tiny_models import random_ids


def padded(left: bool) -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": random_ids(2, 9), "attention_mask": mask if left else mask.flip(1)}


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_softmax_in_the_place_of_softmax_changes_nothing(make: Any, left: bool) -> None:
    batch = padded(left)
    exact = make()(**batch).logits
    swapped = swap_attention(make(), "softmax")(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(swapped[real], exact[real])
    assert not torch.allclose(swap_attention(make(), "identity")(**batch).logits[real], exact[real])


@torch.no_grad()
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_favor_that_sees_all_exactly_changes_nothing(make: Any) -> None:
    """Scale, causality, key heads and padding reach the mechanism."""
    batch = padded(left=True)
    real = batch["attention_mask"].bool()
    swapped = swap_attention(make(), "favor", num_features=8, near=8)(**batch).logits
    torch.testing.assert_close(swapped[real], make()(**batch).logits[real])


@torch.no_grad()
def test_causal_by_call() -> None:
    """CLIP's modules say that they are not causal, and are told that they are."""
    made = []
    for swap in (False, True):
        torch.manual_seed(0)
        sizes = {**SIZES, "intermediate_size": 16, "max_position_embeddings": 16, "initializer_range": 1.0}
        model = CLIPTextModel(CLIPTextConfig(**sizes, eos_token_id=22)).double().eval()
        made.append((swap_attention(model, "softmax") if swap else model)(random_ids(2, 9)).last_hidden_state)
    torch.testing.assert_close(made[1], made[0])


@torch.no_grad()
def test_scales_of_its_own() -> None:
    options = {"scale_attn_by_inverse_layer_idx": True}
    ids = random_ids(2, 9)
    torch.testing.assert_close(swap_attention(gpt2(**options), "softmax")(ids).logits, gpt2(**options)(ids).logits)
    swapped = swap_attention(gpt2(**options), "favor", near=8)
    scales = [block.attn.subquad_attention.options.scale for block in swapped.transformer.h]
    assert scales == [0.5, 0.25]
    assert [b.attn.subquad_attention.head_dim for b in swap_attention(swapped, "linear").transformer.h] == [4, 4]


def test_features_are_the_layers_own_and_are_saved() -> None:
    first, second = (swap_attention(llama(), "favor", num_features=8, near=4, seed=seed) for seed in (1, 2))
    features = [layer.self_attn.subquad_attention.features.weight for layer in first.model.layers]
    assert features[0].shape == (2, 8, 4)
    assert not torch.equal(features[0], features[1])
    second.load_state_dict(first.state_dict())
    ids = random_ids(1, 20)
    assert torch.equal(first(ids, use_cache=False).logits, second(ids, use_cache=False).logits)


def test_a_swapped_model_is_calibrated() -> None:
    model = swap_attention(bert(attention_probs_dropout_prob=0.0).float(), "favor", num_features=16, near=0, sinks=0)
    batches = [{"input_ids": random_ids(2, 30 + i)} for i in range(3)]
    before = model(**batches[0]).logits
    report = subquad.calibrate(model, batches, estimator="hedgehog", steps=20)
    assert [layer.name for layer in report.layers] == [
        f"bert.encoder.layer.{i}.attention.self.subquad_attention" for i in range(2)
    ]
    assert report.mean_after < report.mean_before
    assert not torch.equal(model(**batches[0]).logits, before)
    model.train()(**batches[0]).logits.sum().backward()  # and goes on learning with the model
    assert model.bert.encoder.layer[0].attention.self.subquad_attention.features.query.grad is not None


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_positions_of_padding_may_be_any(left: bool) -> None:
    """generate() gives padding the position 1, or whatever comes."""
    batch, model = padded(left), swap_attention(llama(), "favor", near=8)
    real = batch["attention_mask"].bool()
    positions = (batch["attention_mask"].cumsum(1) - 1).masked_fill(~real, 1)
    placed = model(**batch, position_ids=positions, use_cache=False).logits[real]
    torch.testing.assert_close(placed, llama()(**batch, position_ids=positions).logits[real])


@torch.no_grad()
def test_generating_without_a_cache() -> None:
    ids = random_ids(1, 5)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    swapped = swap_attention(llama(), "favor", near=16)
    assert torch.equal(swapped.generate(ids, **options), llama().generate(ids, **options))


BART: dict[str, Any] = {
    f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("attention_heads", 2), ("ffn_dim", 8))
}


def crossed() -> Any:
    return bert(is_decoder=True, add_cross_attention=True)


def named_only() -> Any:
    swap_attention(llama(), "favor")  # transformers knows the name from now on
    model = llama()
    model.set_attn_implementation("subquad")
    return model


def without_head_dim() -> Any:
    model = llama()
    for layer in model.model.layers:
        del layer.self_attn.head_dim
    return model


MISTAKES: dict[str, Any] = {
    "no model": (
        lambda: swap_attention(nn.Linear(2, 2), "favor"),
        errors.ConfigError,
        "swap_attention: Linear is no Hugging Face model whose attention can be replaced",
    ),
    "no attention": (
        lambda: swap_attention(bert(), "favr"),
        errors.ConfigError,
        "unknown attention 'favr' (did you mean 'favor'?); known: " + ", ".join(m.name for m in subquad.MECHANISMS),
    ),
    "cross-attention by name": (
        lambda: swap_attention(
            BartModel(BartConfig(vocab_size=23, d_model=16, encoder_layers=1, decoder_layers=1, **BART)), "favor"
        ),
        errors.ConfigError,
        "swap_attention: decoder.layers.0.encoder_attn is cross-attention; only self-attention can be replaced",
    ),
    "cross-attention": (
        lambda: swap_attention(crossed(), "favor"),
        errors.ConfigError,
        "swap_attention: bert.encoder.layer.0.crossattention.self is cross-attention; only self-attention can be "
        "replaced",
    ),
    "cache": (
        lambda: swap_attention(llama(), "favor")(
            random_ids(1, 1), past_key_values=llama()(random_ids(1, 5), use_cache=True).past_key_values
        ),
        errors.ConfigError,
        "LlamaAttention: got 1 queries and 6 keys; give whole sequences, without a cache (use_cache=False, also of "
        "generate and pipeline)",
    ),
    "packed sequences": (
        lambda: swap_attention(llama(), "favor")(random_ids(2, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])),
        errors.ConfigError,
        "LlamaAttention: position_ids go from 2 to 0 within row 0: sequences packed into one row would attend to each "
        "other; give each sequence a row of its own",
    ),
    "the name of the implementation alone": (
        lambda: named_only()(random_ids(1, 5)),
        errors.ConfigError,
        "LlamaAttention: has no mechanism of subquad; attn_implementation='subquad' alone gives it none, call "
        "swap_attention(model, ...), or subquad.load(folder) for a model that was saved with one",
    ),
    "a bias by distance": (
        lambda: swap_attention(T5Model(T5Config(vocab_size=20, d_model=16, d_kv=4, num_heads=4, num_layers=1))),
        errors.ConfigError,
        "swap_attention: encoder.block.0.layer.0.SelfAttention adds a bias by distance to its logits, which no "
        "mechanism can",
    ),
    "heads of unknown width": (
        lambda: swap_attention(without_head_dim()),
        errors.ConfigError,
        "swap_attention: model.layers.0.self_attn (LlamaAttention) has neither head_dim nor attention_head_size; only "
        "models that say how wide their heads are can have their attention replaced",
    ),
    "too few layers": (
        lambda: swap_attention(llama(), ["favor"]),
        errors.ConfigError,
        "swap_attention: attention must be a list with a str for each of 2 layers, got ['favor']",
    ),
    "options that are no list": (
        lambda: swap_attention(llama(), layer_options={"near": 4}),  # type: ignore[arg-type]
        errors.ConfigError,
        "swap_attention: layer_options must be a list with a dict for each of 2 layers, got {'near': 4}",
    ),
    "options twice": (
        lambda: swap_attention(llama(), near=4, layer_options=[{}, {}]),
        errors.ConfigError,
        "swap_attention: got options for all layers (near) and layer_options",
    ),
    "options of one for others": (
        lambda: swap_attention(llama(), ["favor", "softmax"], near=4),
        errors.ConfigError,
        "swap_attention: layers with different mechanisms need layer_options, a dict for each layer; got {'near': 4} "
        "for all",
    ),
    "dropout": (
        lambda: swap_attention(bert(), "favor").train()(random_ids(1, 5)),
        errors.ConfigError,
        "BertSelfAttention: drops attention weights with probability 0.1 in training, but without a matrix of weights "
        "there is nothing to drop; set its attention dropout to 0",
    ),
    "mask": (
        lambda: swap_attention(llama(), "favor")(random_ids(1, 5), attention_mask=torch.zeros(1, 1, 5, 5).double()),
        errors.MaskError,
        "LlamaAttention: attention_mask must be [batch, length], 1 for real tokens, got [1, 1, 5, 5]",
    ),
    "causal": (
        lambda: swap_attention(llama(), "linformer", max_length=16, rank=4)(random_ids(1, 5)),
        errors.ConfigError,
        "linformer: cannot be causal, its projections mix the keys of all positions; use causal=False",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call: Any, kind: type, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_nothing_changes_where_it_fails() -> None:
    model = bert()
    with pytest.raises(errors.ConfigError):
        swap_attention(model, "favor", num_features=0)
    assert model.config._attn_implementation == bert().config._attn_implementation
    assert not any("subquad" in name for name, _ in model.named_modules())


class Bare(nn.Module):
    """Attention whose projections are elsewhere."""

    is_causal, head_dim = False, 4

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def test_attention_without_weights_of_its_own() -> None:
    model = bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self = Bare(model.config)
    swap_attention(model.to("meta"), "favor", num_features=8)
    children = [layer.attention.self.subquad_attention for layer in model.bert.encoder.layer]
    assert [child.features.weight.device.type for child in children] == ["meta", "meta"]


def tiny_gguf(path: Path) -> None:
    """A llama of two layers, its matrices quantised."""
    import gguf

    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(23)
    shapes = {"token_embd": (23, 32), "output_norm": (32,), "output": (23, 32)}
    for layer in range(2):
        square = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        wide = {"ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32), "attn_norm": (32,), "ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {**square, **wide}.items()}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        weight = generator.standard_normal(shape).astype(np.float32)
        if name.startswith("blk") and len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_models_from_gguf_can_be_saved(tmp_path: Path) -> None:
    """transformers has unpacked the weights, and refuses to save them all the same."""
    tiny_gguf(tmp_path / "model.gguf")
    model: Any = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "before")
    swap_attention(model, "favor", num_features=8, near=4)
    model.save_pretrained(tmp_path / "after")
    again = subquad.load(tmp_path / "after")
    ids = random_ids(1, 12)
    assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_weights_that_stay_packed_keep_their_mark() -> None:
    model = llama()
    config = SimpleNamespace(quant_method="gguf")
    model.hf_quantizer = SimpleNamespace(quantization_config=config, packed_modules={"a": 1})
    swap_attention(model, "favor", num_features=8)
    assert model.hf_quantizer.quantization_config is config


def test_the_usual_scale_of_a_module_that_names_none() -> None:
    assert module_scale(SimpleNamespace(), 16) == 0.25
    assert module_scale(SimpleNamespace(scaling=0.7), 16) == 0.7
    assert scaling(SimpleNamespace(), 16) == {}
    assert scaling(SimpleNamespace(scaling=0.7), 16) == {"scale": 0.7}
