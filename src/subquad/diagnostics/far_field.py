"""What FAVOR layers bring from beyond near blocks and sinks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from subquad.checks.calibration import all_exact
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.record import Recording
from subquad.recording.stream import Batch, evaluating, is_favor

SMALL_SHARE = 0.01  # of the output
SMALL_LOSS = 1e-3  # nats per token


class FarField(NamedTuple):
    """Of one layer. share: how much its output changes without the far field, relative to the output. loss: how much
    the loss of the model grows without it; None for models that have no loss."""

    name: str
    share: float
    loss: float | None

    @property
    def idle(self) -> bool:
        """Whether the model would do as well without."""
        return self.share < SMALL_SHARE or (self.loss is not None and self.loss < SMALL_LOSS)

    @property
    def words(self) -> str:
        loss = "" if self.loss is None else f", the loss by {self.loss:+.4f}"
        return f"{self.name} (without it the output changes by {100 * self.share:.1f} %{loss})"


def far_fields(model: nn.Module, batches: Sequence[Batch]) -> list[FarField]:
    """Of every FAVOR layer that has one at the lengths of the batches."""
    if not any(isinstance(module, FavorAttention) for module in model.modules()):
        return []
    found: list[FarField] = []
    usual = mean_loss(model, batches)
    for layer in Recording(model, batches, op="diagnose", exact=False, wanted=is_favor):
        mechanism = cast(FavorAttention, layer.mechanism)
        share = far_share(mechanism, layer.calls)
        if share is not None:
            found.append(FarField(layer.name, share, loss_without(mechanism, model, batches, usual)))
    return found


@torch.no_grad()
def far_share(mechanism: FavorAttention, calls: Sequence[Call]) -> float | None:
    """None if there is no far field, or nothing but a far field."""
    options = mechanism.options
    some = any(call.k.shape[2] > all_exact(options, call.causal) for call in calls)
    if not some or not options.far or not (options.near or options.sinks):
        return None
    change, size = 0.0, 0.0
    for call in calls:
        output = call.attend(mechanism).double()
        with without_far_field(mechanism):
            near = call.attend(mechanism).double()
        real = call.real[:, None, :, None]
        change += float(((output - near) * real).square().sum())
        size += float((output * real).square().sum())
    return (change / size) ** 0.5 if size else 0.0


@contextmanager
def without_far_field(mechanism: FavorAttention) -> Iterator[None]:
    before, mechanism.far = mechanism.far, False
    try:
        yield
    finally:
        mechanism.far = before


def loss_without(
    mechanism: FavorAttention, model: nn.Module, batches: Sequence[Batch], usual: float | None
) -> float | None:
    """How much the loss grows above the `usual` one without the layer's far field."""
    if usual is None:
        return None
    with without_far_field(mechanism):
        without = mean_loss(model, batches)
    return None if without is None else without - usual


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Sequence[Batch]) -> float | None:
    """Of models that are given labels, or that predict the next token; else None."""
    losses = []
    with evaluating(model):
        for batch in batches:
            labelled = _with_labels(model, batch)
            loss = None if labelled is None else getattr(model(**labelled), "loss", None)
            if loss is None:
                return None
            losses.append(float(loss))
    return sum(losses) / len(losses)


def _with_labels(model: nn.Module, batch: Batch) -> dict[str, Any] | None:
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        return None
    if "labels" in batch:
        return dict(batch)
    predicts: Callable[[], bool] = getattr(model, "can_generate", lambda: False)
    if "input_ids" not in batch or not predicts():
        return None
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(~mask.bool(), -100)
    return {**batch, "labels": labels}
