"""Scores and vectors of models of transformers, read piece by piece, in batches, between special tokens."""

from typing import Any

import pytest
import torch

import tiny_heads
from subquad import errors
from subquad.conversion import swap_attention
from subquad.models import embeddings, log_likelihoods, pseudo_log_likelihoods, scoring
from tiny_folders import MIXED
from tiny_models import random_ids

LENGTHS = (13, 29, 8)


def sequences() -> list[Any]:
    return [random_ids(1, length)[0] % 20 for length in LENGTHS]


def model_of(family: str) -> Any:
    return swap_attention(tiny_heads.llama(), "mixed", **MIXED) if family == "mixed" else tiny_heads.FAMILIES[family]()


@pytest.mark.parametrize("start", [7, (7, 3)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixed"])
def test_pieces_give_the_scores_of_the_whole(
    family: str, start: int | tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys and values, or with states, in between; padded batches too."""
    model, given = model_of(family), sequences()
    before = torch.tensor([start] if isinstance(start, int) else start)
    with torch.no_grad():
        wanted = []
        for ids in given:
            whole = torch.cat([before, ids])
            scores = model(whole[None], use_cache=False).logits[0].log_softmax(-1)
            wanted.append(scores[len(before) - 1 : -1].gather(-1, ids[:, None])[:, 0].float())
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    for piece in (scoring.PIECE, 5):
        monkeypatch.setattr(scoring, "PIECE", piece)
        sizes.clear()
        for one, other in zip(log_likelihoods(model, given, start=start), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert max(sizes) == min(piece, len(before) + max(LENGTHS) - 1)


def test_large_vocabularies_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are held at once are limited, whatever the vocabulary."""
    model, masked, given = tiny_heads.llama(), tiny_heads.bert(), sequences()
    kinds: list[Any] = [(log_likelihoods, model, {}), (pseudo_log_likelihoods, masked, {"mask": 4})]
    wanted = [make(one, given, start=1, **more) for make, one, more in kinds]
    monkeypatch.setattr(scoring, "LOGITS", 40 * 23)
    for one in (model, masked):
        one.register_forward_hook(lambda *call: shapes.append(call[2].logits.shape))
    for (make, one, more), want in zip(kinds, wanted, strict=True):
        shapes: list[Any] = []
        for some, other in zip(make(one, given, start=1, **more), want, strict=True):
            torch.testing.assert_close(some, other, rtol=1e-5, atol=1e-5)
        assert len(shapes) > 1
        assert all(shape.numel() <= 40 * 23 for shape in shapes)


@torch.no_grad()
def test_tokens_on_both_sides_are_read_and_left_out() -> None:
    model, given = tiny_heads.bert(), sequences()
    vectors = embeddings(model.base_model, given, start=(1, 2), end=(3,), mean=False)
    scores = pseudo_log_likelihoods(model, given, start=(1, 2), end=(3,), mask=4, passes=2)
    for ids, found, score in zip(given, vectors, scores, strict=True):
        whole = torch.cat([torch.tensor([1, 2]), ids, torch.tensor([3])])[None]
        wanted = model.base_model(whole, attention_mask=torch.ones_like(whole)).last_hidden_state[0, 2:-1]
        torch.testing.assert_close(found, wanted.float())
        for first in range(2):
            hidden = whole.clone()
            hidden[0, 2 + first : -1 : 2] = 4
            logits = model(hidden, attention_mask=torch.ones_like(whole)).logits[0, 2:-1].log_softmax(-1)
            torch.testing.assert_close(score[first::2], logits.gather(-1, ids[:, None])[first::2, 0].float())


def test_mistakes() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        log_likelihoods(tiny_heads.llama(), sequences(), start=())
    assert str(caught.value) == (
        "log_likelihoods: start must have at least one token, which the first one is judged after"
    )


def test_models_without_a_cache_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_heads.llama()
    forward = model.forward
    model.forward = lambda *args, **given: forward(*args, **given | {"use_cache": False})
    monkeypatch.setattr(scoring, "PIECE", 5)
    with pytest.raises(errors.ConfigError) as caught:
        log_likelihoods(model, sequences(), start=1)
    assert str(caught.value) == (
        "log_likelihoods: LlamaForCausalLM gives no past_key_values, so a sequence of more than 5 tokens cannot be "
        "read piece by piece; give shorter ones"
    )
