"""What far fields are worth: against the dense definition, against models that never had one, in words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import FavorAttention, SoftmaxAttention, diagnose
from subquad.diagnostics.far_field import FarField, far_fields, far_share, mean_loss, without_far_field
from subquad.recording.calls import Call
from tiny_models import make, random_ids

OPTIONS: dict[str, Any] = {"near": 4, "sinks": 1, "num_features": 8}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(length: int, causal: bool, masked: bool) -> Call:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 5:9] = False
    q, k, v = (normal(2, 2, length, 6, seed=seed) for seed in range(3))
    return Call(q, k, v, causal, mask if masked else None, scale=6**-0.5)


@pytest.mark.parametrize("near", [0, 4])  # rows of masked tokens are zero with near blocks only
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_share_is_what_the_dense_definition_says(causal: bool, masked: bool, near: int) -> None:
    options = {**OPTIONS, "near": near}
    layer, given = FavorAttention(6, **options).double(), call(30, causal, masked)
    outputs = []
    for far in (True, False):
        other = FavorAttention(6, **options, far=far).double()
        other.load_state_dict(layer.state_dict())
        weights = other.attention_matrix(given.q, given.k, causal=causal, key_mask=given.key_mask)
        outputs.append((weights @ given.v)[given.real[:, None].expand(2, 2, 30)])
    wanted = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    share = far_share(layer, [given])
    assert share is not None
    assert wanted > 0.05
    assert share == pytest.approx(float(wanted), rel=1e-12)
    assert layer.far


@pytest.mark.parametrize(
    ("options", "length"),
    [(OPTIONS, 12), ({**OPTIONS, "near": 0, "sinks": 0}, 30), ({**OPTIONS, "far": False}, 30)],
    ids=["all is exact", "nothing but a far field", "switched off"],
)
def test_where_there_is_nothing_to_switch_off(options: Any, length: int) -> None:
    causal = "far" in options or length == 12
    assert far_share(FavorAttention(6, **options).double(), [call(length - 4, causal, masked=False)]) is None


def test_outputs_of_nothing_have_no_share() -> None:
    given = call(30, causal=True, masked=False)
    given.v.zero_()
    assert far_share(FavorAttention(6, **OPTIONS).double(), [given]) == 0


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_that_of_a_model_without_it(padded: bool) -> None:
    model, ids = make(attention="favor", attention_options=OPTIONS, short_conv=0), random_ids(2, 40)
    batch: dict[str, Tensor] = {"input_ids": ids}
    labels = ids.clone()
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, :7] = 0
        labels[0, :7] = -100
    found = far_fields(model, [batch])
    usual = float(model(**batch, labels=labels).loss.detach())
    for number, far in enumerate(found):
        other = make(
            attention="favor", attention_options=[{**OPTIONS, "far": layer != number} for layer in (0, 1)], short_conv=0
        )
        other.load_state_dict(model.state_dict())
        assert far.loss == pytest.approx(float(other(**batch, labels=labels).loss.detach()) - usual, abs=1e-9)
        assert far.name == f"model.layers.{number}.attention.mechanism"
        assert far.loss != 0
    assert len(found) == 2
    assert mean_loss(model, [{**batch, "labels": labels}, {**batch, "labels": labels}]) == pytest.approx(usual)


def test_models_without_a_loss_or_without_features() -> None:
    model = make(attention="favor", attention_options=OPTIONS)
    assert [far.loss for far in far_fields(model.model, [random_ids(1, 40)])] == [None, None]
    assert mean_loss(model, [(random_ids(1, 40),)]) is None
    assert far_fields(make(attention="softmax"), [random_ids(1, 40)]) == []
    assert far_fields(SoftmaxAttention(6), [tuple(normal(1, 2, 9, 6, seed=s) for s in range(3))]) == []


def test_it_is_switched_on_again_after_an_error() -> None:
    layer = FavorAttention(6, **OPTIONS)
    seen = []

    def fail() -> None:
        with without_far_field(layer):
            seen.append(layer.far)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*seen, layer.far] == [False, True]


@pytest.mark.parametrize(
    ("share", "loss", "idle"),
    [
        (0.5, None, False),
        (0.009, None, True),
        (0.5, 0.1, False),
        (0.5, 0.0009, True),
        (0.5, -0.1, True),
        (0, 0.1, True),
    ],
)
def test_idle_far_fields(share: float, loss: float | None, idle: bool) -> None:
    assert FarField("a", share, loss).idle == idle


def test_in_words() -> None:
    assert FarField("a", 0.1234, 0.56789).words == "a (without it the output changes by 12.3 %, the loss by +0.5679)"
    assert FarField("a", 0.1234, None).words == "a (without it the output changes by 12.3 %)"
    model = make(attention="favor", attention_options=OPTIONS)
    found = diagnose(model, [random_ids(2, 40)], progress=False)
    first, *lines = found.far_field.splitlines()
    assert first == "far field:"
    for layer, far, line in zip(found.layers, far_fields(model, [random_ids(2, 40)]), lines, strict=True):
        assert (layer.far_share, layer.far_loss) == (far.share, far.loss)
        short = far._replace(name=far.name.split("model.")[1].split(".attention")[0])
        assert line == "  " + short.words + (": contributes nothing" if far.idle else "")
    assert str(found).endswith(found.far_field)
    assert diagnose(make(attention="softmax"), [random_ids(2, 40)], progress=False).far_field == ""
