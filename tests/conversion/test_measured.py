"""What a model loses as a whole, against the divergence by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForSequenceClassification

from subquad.conversion.measured import Judge, Measured
from tiny_heads import FAMILIES, llama
from tiny_hugging_face import bert as headless
from tiny_models import random_ids

IDS = random_ids(2, 24)


def changed(model: Any) -> None:
    """In place: the middle of the model, not its embeddings."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name and "w" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def words(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits.float().log_softmax(-1)


def divergence(exact: Tensor, now: Tensor) -> Tensor:
    return (exact.exp() * (exact - now)).sum(-1)


@pytest.mark.parametrize("rows", [4, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_divergence_of_words(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some places, evenly spread, where there are many; none of them is padding."""
    monkeypatch.setattr("subquad.conversion.measured.ROWS", rows)
    model, mask = FAMILIES[family](), torch.ones_like(IDS)
    mask[1, 15:] = 0
    batch, copy = {"input_ids": IDS, "attention_mask": mask}, IDS[:, :10].repeat(1, 2)
    judge = Judge(model, [batch], [copy])
    before = words(model, batch), words(model, {"input_ids": copy})
    assert judge.measured() == Measured(0.0, 0.0)
    changed(model)
    after = words(model, batch), words(model, {"input_ids": copy})
    nats, again = (divergence(a, b) for a, b in zip(before, after, strict=True))
    step = {4: (6, 2), 512: (1, 1)}[rows]
    found = judge.measured()
    assert found.nats > 1e-3
    assert found.nats == pytest.approx(nats[:, :: step[0]][mask[:, :: step[0]].bool()].mean().item(), rel=1e-4)
    assert found.copying == pytest.approx(again[:, 10 :: step[1]].mean().item(), rel=1e-4)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_batches_count_by_their_tokens() -> None:
    model = llama()
    batches = [{"input_ids": IDS}, {"input_ids": IDS[:1, :5]}]
    judge, before = Judge(model, batches, []), [words(model, batch) for batch in batches]
    changed(model)
    each = [divergence(was, words(model, batch)).flatten() for was, batch in zip(before, batches, strict=True)]
    assert judge.measured().nats == pytest.approx(torch.cat(each).mean().item(), rel=1e-4)
    assert judge.measured().copying is None


def test_hidden_states_by_their_relative_change() -> None:
    model = headless()
    judge = Judge(model, [IDS], [])
    with torch.no_grad():
        before = model(IDS).last_hidden_state
        changed(model)
        off = model(IDS).last_hidden_state - before
    want = (off.square().sum(-1) / before.square().sum(-1) / 2).mean().item()
    assert judge.measured().nats == pytest.approx(want, rel=1e-4)
    assert want > 0


def test_classes_of_whole_sequences() -> None:
    config = llama().config
    config.pad_token_id, config.num_labels = 0, 3
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    judge = Judge(model, [IDS], [])
    before = words(model, {"input_ids": IDS})
    changed(model)
    want = divergence(before, words(model, {"input_ids": IDS})).mean().item()
    assert judge.measured().nats == pytest.approx(want, rel=1e-3)


def test_words_that_are_never_said() -> None:
    """A logit of minus infinity in both models is no difference."""
    model = llama()
    bias = torch.zeros(23, dtype=torch.float64)
    bias[3] = -torch.inf
    model.lm_head.register_forward_hook(lambda *given: given[-1] + bias)
    judge = Judge(model, [IDS], [])
    changed(model)
    assert 0 < judge.measured().nats < 1e3
