"""What errors of heads cost, against what they do cost."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from subquad.conversion.sensitivity import PIECE, sensitivity
from subquad.recording.hugging_face import implementation
from subquad.recording.progress import silent
from tiny_heads import FAMILIES, llama
from tiny_hugging_face import bert as headless
from tiny_models import random_ids

NAME = "model.layers.1.self_attn"


def perturbed(model: Any, layer: str, error: Tensor, ids: Tensor) -> Tensor:
    """What the model predicts if the outputs of one attention layer are off by `error` `[B, H, T, Dv]`."""
    wrong = dict(model.named_modules())[layer]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (out + error if module is wrong else out).transpose(1, 2), None

    AttentionInterface.register("perturbed", attend)
    with implementation(model, "perturbed"), torch.no_grad():
        return model(ids).logits.log_softmax(-1)


@pytest.mark.parametrize("second_half", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_it_foretells_how_predictions_change(layer: int, second_half: bool) -> None:
    """Small errors, drawn anew for each token, of one head at a time: the divergence from the exact predictions.

    Of the second half: errors are there, and so is what counts. Both sides are means over draws: .15 is four standard
    errors of their ratio.
    """
    model, ids, name = llama(), random_ids(64, 24), f"model.layers.{layer}.self_attn"
    first = 12 if second_half else 0
    cost = sensitivity(model, [ids] * (20 if second_half else 10), seed=0, tell=silent, second_half=second_half)[
        name
    ].double()
    exact = perturbed(model, name, torch.zeros(1, dtype=torch.float64), ids)
    generator = torch.Generator().manual_seed(1)
    for head in range(4):
        measured, foretold = 0.0, 0.0
        for _ in range(16 if second_half else 8):  # as many tokens
            error = torch.zeros(64, 4, 24, 4, dtype=torch.float64)
            error[:, head, first:] = 1e-3 * torch.randn(64, 24 - first, 4, generator=generator, dtype=torch.float64)
            other = perturbed(model, name, error, ids)
            measured += (exact.exp() * (exact - other)).sum(-1)[:, first:].mean().item()
            foretold += ((error[:, head] @ cost[head]) * error[:, head]).sum(-1)[:, first:].mean().item() / 2
        assert foretold == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_left_as_it_was(family: str) -> None:
    model = FAMILIES[family]().train()
    next(model.parameters()).requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    found = sensitivity(model, [random_ids(2, 12)], seed=0, tell=silent)
    assert len(found) == 2
    assert all(x.shape == (4, 4, 4) and bool(x.isfinite().all()) and x.norm() > 0 for x in found.values())
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert model(random_ids(1, 5)).logits.requires_grad
    assert not model.get_input_embeddings()._forward_hooks


def test_padding_has_no_part() -> None:
    model, ids = llama(), random_ids(2, 19)
    other = torch.cat([ids[:, :12], (ids[:, 12:] + 1) % 23], 1)
    mask = (torch.arange(19) < 12).long().expand(2, -1)
    masked = [sensitivity(model, [{"input_ids": x, "attention_mask": mask}], seed=0, tell=silent) for x in (ids, other)]
    for layer in masked[0]:  # of the first, queries of padding could tell something about the real tokens they see
        torch.testing.assert_close(masked[0][layer], masked[1][layer])
    seen = [sensitivity(model, [x], seed=0, tell=silent) for x in (ids, other)]
    assert not torch.allclose(seen[0][NAME], seen[1][NAME])


def test_only_the_first_tokens_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.conversion.sensitivity.PIECE", 8)
    model, ids = llama(), random_ids(2, 12)
    whole = sensitivity(model, [ids], seed=0, tell=silent)[NAME]
    torch.testing.assert_close(whole, sensitivity(model, [ids[:, :8]], seed=0, tell=silent)[NAME])
    assert PIECE == 1024


def test_nothing_of_a_batch_stays_in_memory() -> None:
    """Without waiting for the collector of cycles, which does not know how large tensors are."""
    model = llama()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(x) is Tensor for x in gc.get_objects())
        found = sensitivity(model, [random_ids(2, 12)] * 3, seed=0, tell=silent)
        assert sum(type(x) is Tensor for x in gc.get_objects()) <= before + len(found)
    finally:
        gc.enable()


def test_a_model_without_words_counts_changes_of_its_hidden_states() -> None:
    found = sensitivity(headless(), [random_ids(3, 10)], seed=0, tell=silent)
    assert len(found) == 3
    assert all(float(x.diagonal(dim1=1, dim2=2).sum()) > 0 for x in found.values())
