"""Swapped models generate with states as they do without a cache."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, MistralConfig, MistralForCausalLM

import subquad
from subquad import errors
from subquad.conversion import swap_attention
from subquad.conversion.generation import StateCache
from tiny_heads import SIZES, bert, gpt2, llama, opt
from tiny_models import favor_and_softmax, random_ids

DECODERS: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "opt": opt}
MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "favor": {"num_features": 8, "near": 2, "sinks": 1},
    "linear": {},
    "window": {"window": 4},
    "strided": {"stride": 2},
    "pages": {"pages": 1, "page": 2, "window": 2, "sinks": 1},
    "lsh": {"num_buckets": 4, "bucket_size": 4, "rounds": 1},
    "cluster": {"num_clusters": 4, "bucket_size": 4},
    "mixed": {},  # by the key heads of the model
}
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}

families = pytest.mark.parametrize("family", DECODERS)
mechanisms = pytest.mark.parametrize("name", MECHANISMS)


def swapped(family: str, name: str) -> Any:
    options = favor_and_softmax(2 if family == "llama" else 4) if name == "mixed" else MECHANISMS[name]
    return swap_attention(DECODERS[family](), name, **options)


def left_padded() -> dict[str, Tensor]:
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :4] = mask[1, :1] = 0
    return {"input_ids": random_ids(3, 7), "attention_mask": mask}


def refusal(model: Any) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        model.generate(random_ids(1, 6), **GREEDY)
    return str(caught.value)


def same_with_and_without(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(1)
    want = model.generate(**batch, **GREEDY | options, use_cache=False)
    torch.manual_seed(1)
    got = model.generate(**batch, **GREEDY | options, return_dict_in_generate=True)
    assert isinstance(got.past_key_values, StateCache)
    assert torch.equal(got.sequences, want)
    return got


@torch.no_grad()
@families
@mechanisms
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "sampling", "beams", "several"],
)
def test_with_states_as_without_a_cache(family: str, name: str, options: dict[str, Any]) -> None:
    same_with_and_without(swapped(family, name), left_padded(), **options)


@torch.no_grad()
@families
@mechanisms
def test_logits_token_by_token(family: str, name: str) -> None:
    """In pieces of any size, with padding before and between."""
    model, batch = swapped(family, name), left_padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, parts = None, []
    for begin, end in ((0, 1), (1, 5), (5, 6), (6, 7)):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        out = model(ids[:, begin:end], **given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert isinstance(cache, StateCache)
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])


@torch.no_grad()
@families
@pytest.mark.parametrize("name", ["favor", "mixed"])
def test_a_prompt_in_chunks(family: str, name: str) -> None:
    model, ids = swapped(family, name), random_ids(2, 12)
    want = model.generate(ids, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, **GREEDY, prefill_chunk_size=5), want)


@torch.no_grad()
@families
@pytest.mark.parametrize("name", ["favor", "mixed"])
def test_a_second_turn_and_many_from_one_prompt(family: str, name: str) -> None:
    model, ids = swapped(family, name), random_ids(1, 6)
    first = same_with_and_without(model, {"input_ids": ids})
    kept = copy.deepcopy(first.past_key_values)
    for seed in (5, 6):
        turn = torch.randint(1, 23, (1, 4), generator=torch.Generator().manual_seed(seed))
        longer = torch.cat([first.sequences, turn], 1)
        given = {"attention_mask": torch.ones_like(longer)}  # or else token 0 would be taken for padding
        again = model.generate(longer, **given, **GREEDY, past_key_values=copy.deepcopy(kept))
        assert torch.equal(again, model.generate(longer, **given, **GREEDY, use_cache=False))
    assert kept.get_seq_length() == first.sequences.shape[1] - 1  # the last token was not read yet


@torch.no_grad()
def test_a_state_stays_as_small_as_it_was() -> None:
    model = swapped("llama", "favor")
    sizes = {
        model.generate(random_ids(1, n), **GREEDY, return_dict_in_generate=True).past_key_values.nbytes()
        for n in (5, 40)
    }
    assert len(sizes) == 1


@torch.no_grad()
def test_copies_generate_too() -> None:
    model, ids = swapped("llama", "favor"), random_ids(1, 6)
    want = model.generate(ids, **GREEDY, use_cache=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), swap_attention(model, "favor", near=8)):
        assert len(other._forward_pre_hooks) == len(other._forward_hooks) == 1
        assert isinstance(other.generate(ids, **GREEDY, return_dict_in_generate=True).past_key_values, StateCache)
    for other in (copy.deepcopy(swapped("llama", "favor")), pickle.loads(pickle.dumps(swapped("llama", "favor")))):
        assert torch.equal(other.generate(ids, **GREEDY), want)


@torch.no_grad()
@pytest.mark.parametrize("as_dict", [True, False])
def test_arguments_by_place_and_outputs_as_tuples(as_dict: bool) -> None:
    model, ids = swapped("llama", "favor"), random_ids(2, 6)
    whole = model(ids, use_cache=False).logits
    places = (None, None, None, None, None, True)  # mask, positions, cache, embeddings, labels, use_cache
    first = model(ids[:, :5], *places, return_dict=as_dict)
    cache = first.past_key_values if as_dict else first[1]
    assert isinstance(cache, StateCache)
    last = model(ids[:, 5:], None, None, cache, return_dict=as_dict)
    torch.testing.assert_close(last.logits if as_dict else last[0], whole[:, 5:])


@torch.no_grad()
def test_a_loaded_model_generates_with_states(tmp_path: Path) -> None:
    swapped("llama", "favor").save_pretrained(tmp_path)
    same_with_and_without(subquad.load(tmp_path), left_padded())


@torch.no_grad()
def test_exact_models_keep_keys_and_values() -> None:
    model = swapped("llama", "favor")
    model.set_attn_implementation("sdpa")
    out = model.generate(random_ids(1, 6), **GREEDY, return_dict_in_generate=True)
    assert type(out.past_key_values) is DynamicCache


@torch.no_grad()
def test_mechanisms_without_a_state_say_how(monkeypatch: pytest.MonkeyPatch) -> None:
    model = swapped("llama", "favor")
    monkeypatch.setattr(model.model.layers[1].self_attn.subquad_attention, "supports_state", False, raising=False)
    assert refusal(model) == (
        "LlamaAttention: got 1 queries and 7 keys; give whole sequences, without a cache (use_cache=False, also of "
        "generate and pipeline)"
    )


@torch.no_grad()
def test_the_window_of_a_model_counts_what_is_in_the_state() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "sliding_window": 8}
    model: Any = swap_attention(MistralForCausalLM(MistralConfig(**sizes)).eval(), "favor", near=2)
    assert "attends within a window of 8 tokens, got 9; " in refusal(model)


@torch.no_grad()
def test_keys_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = swapped("llama", "favor")
    update = StateCache.update
    monkeypatch.setattr(StateCache, "update", lambda *a, **o: tuple(x.clone() for x in update(*a, **o)))
    assert refusal(model) == (
        "LlamaForCausalLM: the keys of layers 0, 1 are changed between the cache and attention, so they did not reach "
        "the states; use_cache=False"
    )


@torch.no_grad()
def test_a_state_is_causal() -> None:
    module = swap_attention(bert(), "favor", near=2).bert.encoder.layer[0].attention.self
    q = torch.randn(1, 4, 3, 4, dtype=torch.float64)
    k, v = StateCache(2).update(q, q, 0)
    with pytest.raises(errors.ConfigError) as caught:
        AttentionInterface()["subquad"](module, q, k, v, None)
    assert str(caught.value) == "BertSelfAttention: is not causal, so it cannot go on from a state; use_cache=False"
