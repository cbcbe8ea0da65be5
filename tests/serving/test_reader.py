"""Prompts that are read once: caches that are forked, taken back, joined, and gone on from by `generate`."""

from typing import Any

import pytest
import torch

from subquad.serving import join, read
from tiny_served import MODELS, alone, lengths, prompt


def ones(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids)


@pytest.mark.parametrize("name", MODELS)
def test_generate_goes_on_from_forks(name: str) -> None:
    """One system prompt, three requests of one batch, padded between the prompt and their own tokens."""
    model, system = MODELS[name](), prompt(9, 50)
    turns = [prompt(length, length) for length in (1, 4, 2)]
    ids = torch.stack([torch.cat([system, torch.zeros(4 - len(t), dtype=torch.long), t]) for t in turns])
    mask = torch.stack([torch.cat([ones(system), torch.zeros(4 - len(t), dtype=torch.long), ones(t)]) for t in turns])
    kept = read(model, system, chunk=4)
    cache = kept.fork(3)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, ids.shape[1] :]
    assert made.tolist() == [alone(model, torch.cat([system, turn]), 6) for turn in turns]
    assert lengths(kept) == [9]
    assert lengths(cache) == [9 + len(turn) + 5 for turn in turns]


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_chunks_change_nothing(chunk: int) -> None:
    model = MODELS["llama favor"]()
    cache: Any = read(model, prompt(11), chunk=chunk)
    whole = model(prompt(11)[None], use_cache=True).past_key_values
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        for got, want in zip(layer.state, other.state, strict=True):
            torch.testing.assert_close(got, want)
    assert lengths(cache) == lengths(whole) == [11]


def test_prompts_of_one_length() -> None:
    model, ids = MODELS["favor"](), torch.stack([prompt(6), prompt(6, 1)])
    cache = read(model, ids)
    whole = torch.cat([ids, torch.stack([prompt(2, 2), prompt(2, 3)])], 1)
    made = model.generate(
        whole, attention_mask=ones(whole), past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert made[:, 8:].tolist() == [alone(model, row, 4) for row in whole]


@pytest.mark.parametrize("name", MODELS)
def test_joined_caches_go_on_at_their_own_positions(name: str) -> None:
    model, sizes = MODELS[name](), (3, 19, 8)
    ids = [prompt(length, length) for length in sizes]
    cache, more = join(model, [read(model, some) for some in ids]), torch.stack([prompt(4, 60 + n) for n in range(3)])
    assert lengths(cache) == list(sizes)
    positions = torch.tensor(sizes)[:, None] + torch.arange(4)
    with torch.no_grad():
        got = model(more, past_key_values=cache, position_ids=positions, use_cache=True).logits
        for row, some in enumerate(ids):
            want = model(torch.cat([some, more[row]])[None], use_cache=False).logits[0, -4:]
            torch.testing.assert_close(got[row], want)


@pytest.mark.parametrize("name", ["favor", "short_conv", "softmax", "llama favor", "llama pages", "gpt2 mixed"])
def test_a_speculation_is_taken_back(name: str) -> None:
    model: Any = MODELS[name]()
    cache, tokens = read(model, prompt(7)), []
    want = alone(model, torch.cat([prompt(7), prompt(1, 5)]), 6)
    token = prompt(1, 5)
    for turn in range(6):
        kept = cache.snapshot()
        read_more(model, cache, prompt(5, turn))  # what turned out to be wrong
        cache.restore(kept)
        token = read_more(model, cache, token)
        tokens.append(int(token))
    assert tokens == want
    assert lengths(cache) == [7 + 6]


def read_more(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The likeliest token after ids `[T]`; positions and masks as a caller has them who knows nothing of states."""
    mask = torch.ones(1, cache.get_seq_length() + len(ids), dtype=torch.long)
    with torch.no_grad():
        out = model(ids[None], attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.logits[0, -1].argmax()[None]
