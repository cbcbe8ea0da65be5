"""The bill of a conversion, against what is computed by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from subquad.bench.bill import ROWS, Bill, Biller, Vocabulary, plan_of
from subquad.bench.bill.masked import accuracy, cosines, encoded, neighbours_kept
from subquad.bench.bill.rows import CONVERTED, EXACT, FAR_ALONE, NO_FAR, NOTHING, WINDOW, far_fields
from subquad.bench.bill.texts import compared, copy_distances, copying, losses, passkey
from subquad.conversion import swap_attention
from subquad.conversion.generation import CHILD
from subquad.errors import SubquadError
from tiny_heads import bert, gpt2, llama
from tiny_models import random_ids

LENGTH = 200
TEXTS = [random_ids(1, LENGTH), random_ids(1, LENGTH).roll(7, 1)]


class Letters:
    """A tokenizer for the tiny models."""

    mask_token_id = 1

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % 22 for letter in text]}

    def decode(self, ids: Tensor) -> str:
        return " ".join(map(str, ids.tolist()))


@pytest.fixture(scope="module")
def model() -> Any:
    made = llama()
    options = {"window": 32, "sinks": 1, "num_features": 8, "steps": 2, "copying": 0.0, "progress": False}
    subquad.convert(made, TEXTS, budget="exact 25%", kinds=["features", "exact"], **options)
    return made


@pytest.fixture(scope="module")
def found(model: Any) -> Bill:
    return Biller(model, plan_of(model, TEXTS), None).texts(TEXTS, Letters(), [50, 100], progress=False)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def by_hand(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits(model, ids)[0, :-1].float(), ids[0, 1:], reduction="none")


def test_exact_and_converted(model: Any, found: Bill) -> None:
    exact, now = ([by_hand(other, text) for text in TEXTS] for other in (llama(), model))
    assert found.rows[EXACT]["perplexity"] == pytest.approx(math.exp(torch.cat(exact).mean()), rel=1e-5)
    assert found.rows[EXACT]["ratio"] == 1
    assert found.rows[CONVERTED]["perplexity"] == pytest.approx(math.exp(torch.cat(now).mean()), rel=1e-5)
    ratio = math.exp(torch.cat(now).mean() - torch.cat(exact).mean())
    assert found.rows[CONVERTED]["ratio"] == pytest.approx(ratio, rel=1e-5)
    assert abs(ratio - 1) > 1e-3
    assert list(found.rows) == list(ROWS)


def test_controls_are_what_they_say(model: Any, found: Bill) -> None:
    """Each row against a model that was swapped to be just that."""
    window = found.rows[WINDOW]["window"]
    other = {
        WINDOW: swap_attention(llama(), "window", window=window, global_tokens=4),
        NOTHING: swap_attention(llama(), "identity"),
    }
    for row, swapped in other.items():
        want = torch.cat([by_hand(swapped, text) for text in TEXTS]).mean()
        assert found.rows[row]["perplexity"] == pytest.approx(math.exp(want), rel=1e-5)
    assert found.rows[WINDOW]["nbytes"] <= found.rows[CONVERTED]["nbytes"]
    assert found.rows[WINDOW]["nbytes"] > 0.9 * found.rows[CONVERTED]["nbytes"]
    cache = model(TEXTS[0], use_cache=True).past_key_values
    assert found.rows[CONVERTED]["nbytes"] == cache.nbytes()
    assert found.rows[EXACT]["nbytes"] == 2 * 2 * 2 * LENGTH * 4 * 8  # layers, keys and values, key heads


def test_far_fields_off_and_alone(model: Any, found: Bill) -> None:
    """Alone: nothing but features, also for what is near; heads without features have no attention."""
    far = far_fields(model)
    assert far
    for layer in far:
        layer.far = False
    off = torch.cat([by_hand(model, text) for text in TEXTS]).mean()
    for layer in far:
        layer.far = True
    assert found.rows[NO_FAR]["perplexity"] == pytest.approx(math.exp(off), rel=1e-5)
    alone = llama()
    attention, options = [], []
    for layer in range(2):
        name, given = model.config.layer_attention(layer)
        parts = given["parts"] if name == "mixed" else [{"attention": name, "heads": [0, 1], **given}]
        features = {"num_features": 8, "estimator": "hedgehog", "near": 0, "sinks": 0}
        made = [
            {"attention": "favor", "heads": part["heads"], **features}
            if part["attention"] == "favor"
            else {"attention": "identity", "heads": part["heads"]}
            for part in parts
        ]
        attention.append("mixed")
        options.append({"parts": made})
    swap_attention(alone, attention, layer_options=options)
    made = [module for module in alone.modules() if isinstance(module, subquad.FavorAttention)]
    for new, old in zip(made, far, strict=True):
        new.features.load_state_dict(old.features.state_dict(), strict=False)  # pyright: ignore[reportAttributeAccessIssue]
    want = torch.cat([by_hand(alone, text) for text in TEXTS]).mean()
    assert found.rows[FAR_ALONE]["perplexity"] == pytest.approx(math.exp(want), rel=1e-5)


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before, had = logits(model, TEXTS[0]), [getattr(x, CHILD) for x in model.modules() if hasattr(x, CHILD)]
    for row in ROWS.values():
        with pytest.raises(SubquadError, match="on the way"), row(model, 16):
            raise SubquadError("on the way")
    Biller(model, {}, None).texts(TEXTS[:1], Letters(), [], progress=False)
    assert torch.equal(logits(model, TEXTS[0]), before)
    assert [id(getattr(x, CHILD)) for x in model.modules() if hasattr(x, CHILD)] == [id(x) for x in had]
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_time_and_memory_of_lengths(found: Bill) -> None:
    assert [(cost["row"], cost["length"]) for cost in found.speed] == [
        (row, length) for length in (50, 100) for row in (EXACT, CONVERTED)
    ]
    sizes = {(cost["row"], cost["length"]): cost["nbytes"] for cost in found.speed}
    assert sizes[EXACT, 100] == 2 * sizes[EXACT, 50]
    assert sizes[CONVERTED, 100] < 2 * sizes[CONVERTED, 50]
    assert all(cost["token"] == min(cost["samples"]) > 0 and cost["prefill"] > 0 for cost in found.speed)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_losses(make: Any) -> None:
    """Also of a model that changes its logits afterwards, and in pieces."""
    model, ids = make(), TEXTS[0][:, :40]
    torch.testing.assert_close(losses(model, ids), by_hand(model, ids))
    forward = model.forward

    def capped(*args: Any, **given: Any) -> Any:
        output = forward(*args, **given)
        output.logits = 2 * torch.tanh(output.logits)
        return output

    model.forward = capped
    torch.testing.assert_close(losses(model, ids), by_hand(model, ids))


def test_comparisons_are_of_logarithms_over_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.rand(129, generator=generator) for _ in range(2)]
    worse = [torch.rand(129, generator=generator) for _ in range(2)]
    found = compared([a + b for a, b in zip(exact, worse, strict=True)], exact)
    blocks = torch.stack([x[i : i + 64].mean() for x in worse for i in (0, 64)])
    assert found.ratio == pytest.approx(math.exp(torch.cat(worse).mean()), rel=1e-5)
    assert found.error == pytest.approx((blocks.std() / 2).item(), rel=1e-5)
    long = torch.rand(5000, generator=generator)
    assert list(compared([long], [long]).by_place) == ["0-2048", "2048-4096", "4096-5000"]


def test_copies_are_judged_where_they_come_again() -> None:
    model, text = llama(), TEXTS[0]
    twice = text[:, :60].repeat(1, 2)
    assert copying(model, [text], 60) == pytest.approx(math.exp(by_hand(model, twice)[60:].mean()), rel=1e-5)
    assert copy_distances(2048) == [128, 256, 512, 1024]
    assert copy_distances(200) == [100]


@pytest.mark.parametrize(("off", "rightly"), [(0, True), (1, False)])
def test_a_number_is_told_and_asked_for(off: int, rightly: bool) -> None:
    """A model that looks back just as far as the number stands tells it; any other one does not."""
    distance = 150
    back = distance - len("\nThe pass key is") + off

    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Identity()

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

        def forward(self, ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=self.head(F.one_hot(ids.roll(back - 1, 1), 23).float()))

    share = passkey(Copies(), Letters(), TEXTS[0], distance)
    assert share is not None
    assert share == 1 if rightly else share < 0.5
    assert passkey(Copies(), Letters(), TEXTS[0], 60) is None  # telling and asking take more


def test_what_is_known_is_not_measured_again(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan = tmp_path / "bill.json", plan_of(model, TEXTS[:1])
    first = Biller(model, plan, path).texts(TEXTS[:1], Letters(), [50], progress=False)
    assert json.loads(path.read_text())["rows"] == first.rows
    monkeypatch.setattr("subquad.bench.bill.bill.Asked.row", lambda *_: pytest.fail("measured again"))
    again = Biller(model, plan, path).texts(TEXTS[:1], Letters(), [50], progress=False)
    assert again == Bill(plan, first.rows, json.loads(json.dumps(first.speed)), first.policy)
    assert Biller(model, plan_of(model, TEXTS), path).bill.rows == {}
    path.write_text("{")
    assert Biller(model, plan, path).bill.rows == {}


def test_the_policy_is_the_configuration(model: Any, found: Bill) -> None:
    heads = [head for layer in found.policy.values() for head in layer]
    assert sorted(heads) == ["favor", "favor", "favor", "softmax"]
    assert list(found.policy) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_encoders() -> None:
    exact, model = bert(), bert()
    subquad.convert(model, TEXTS, window=32, sinks=0, num_features=8, steps=2, progress=False)
    ids = random_ids(5, 60)
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    found = Biller(model, plan_of(model, [ids]), None).sequences(batches, Vocabulary(1), progress=False)
    assert found.rows[EXACT]["cosine"] == pytest.approx(1)
    assert found.rows[EXACT]["neighbours_kept"] == 1
    assert WINDOW not in found.rows
    with torch.no_grad():
        hidden = [m.bert(**batches[0]).last_hidden_state for m in (exact, model)]
    means = [(x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for x in hidden]
    cosine = F.cosine_similarity(*means)
    assert found.rows[CONVERTED]["cosine"] == pytest.approx(cosine.mean().item(), rel=1e-5)
    assert found.rows[CONVERTED]["smallest_cosine"] == pytest.approx(cosine.min().item(), rel=1e-5)


def test_features_alone_have_nothing_beside_them() -> None:
    model = bert()
    swap_attention(model, "favor", num_features=8, near=0, sinks=0)
    batches = [{"input_ids": random_ids(4, 30), "attention_mask": torch.ones(4, 30, dtype=torch.long)}]
    rows = Biller(model, {}, None).sequences(batches, Vocabulary(1), progress=False).rows
    assert list(rows) == [EXACT, CONVERTED, FAR_ALONE, NOTHING]
    assert rows[FAR_ALONE] == rows[CONVERTED] != rows[NOTHING]


def test_masked_tokens_are_guessed() -> None:
    model, ids = bert(), random_ids(4, 60)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    one = encoded(model, [batch], Vocabulary(1))
    assert 15 < len(one.truth) < 60
    assert accuracy(one) == (one.guesses == one.truth).double().mean().item()
    assert accuracy(encoded(model, [batch], Vocabulary(None))) is None
    assert cosines(one, one).tolist() == pytest.approx([1] * 4)
    assert neighbours_kept(one._replace(means=one.means[:2]), one._replace(means=one.means[:2])) is None
    without = encoded(model, [batch], Vocabulary(1, (3, 5)))
    assert 0 < len(without.truth) < len(one.truth)
    assert not set(without.truth.tolist()) & {3, 5}
    means = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9]])
    assert neighbours_kept(one._replace(means=means), one._replace(means=means[[0, 2, 1, 3]])) == 0
