"""Runs a model, ours or one of Hugging Face, and reports every call of its attention as it happens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subquad.checks import recording as checks
from subquad.mechanism import Mechanism
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.softmax import SoftmaxAttention
from subquad.recording.calls import Layer, Observe
from subquad.recording.hugging_face import observed_attention
from subquad.recording.layers import observed_layers, own_layers
from subquad.recording.progress import Tell, silent

Batch = Tensor | Mapping[str, Any] | tuple[Any, ...]
Wanted = Callable[[Layer], bool]
COMPARABLE = (FavorAttention, SoftmaxAttention)  # what estimates exact attention, or is it


def every(layer: Layer) -> bool:
    return True


def is_favor(layer: Layer) -> bool:
    return isinstance(layer.mechanism, FavorAttention)


@torch.no_grad()
def stream(
    model: nn.Module,
    batches: Sequence[Batch],
    observe: Observe,
    *,
    op: str,
    exact: bool,
    kinds: type | tuple[type, ...] = COMPARABLE,
    wanted: Wanted = every,
    tell: Tell = silent,
) -> list[Layer]:
    """Runs the model once; `observe` is called with every call of the wanted layers. Gives all layers, in order.

    Layers are the mechanisms of these `kinds`; of a model without any, every attention of Hugging Face that is called.

    exact: layers answer with exact attention, so that each is given what it would be given in an exact model. Those of
        Hugging Face always do.
    """
    own = own_layers(model, kinds)
    if own:
        with observed_layers(own, wanted, observe, exact=exact):
            _run(model, batches, tell)
        return own
    checks.can_be_recorded(op, model)
    checks.no_other_mechanism(op, model, len(own_layers(model, Mechanism)))
    with observed_attention(model, wanted, observe) as found:
        _run(model, batches, tell)
        return list(found.values())


def _run(model: nn.Module, batches: Sequence[Batch], tell: Tell) -> None:
    with evaluating(model):
        for number, batch in enumerate(batches):
            if isinstance(batch, Tensor):
                model(batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch)
            tell("running the model", number + 1, len(batches))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
