"""What a choice costs as a whole: the model runs with it, and what it predicts is compared with the exact model's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.recording.stream import Batch, evaluating

ROWS = 512  # predictions of a batch that are compared, evenly spread: each is as large as the vocabulary


@dataclass(frozen=True)
class Measured:
    """Nats per token by which predictions diverge from those of the exact model; for hidden states half the squared
    relative change. copying: where a text is read a second time; None if there is no such text."""

    nats: float
    copying: float | None


class Judge:
    """Knows what the exact model predicts for some batches, and for copies, texts that are read twice."""

    def __init__(self, model: Any, batches: Sequence[Batch], copies: Sequence[Tensor]) -> None:
        self._model, self._batches, self._copies = model, batches, copies
        self._exact = list(self._all())

    def measured(self) -> Measured:
        """Of the model as it is now."""
        found = [_divergence(was, now) for was, now in zip(self._exact, self._all(), strict=True)]
        texts, copies = found[: len(self._batches)], found[len(self._batches) :]
        return Measured(_mean(texts), _mean(copies) if copies else None)

    def _all(self) -> Iterator["_Predicted"]:
        for batch in self._batches:
            yield _predicted(self._model, batch, second_half=False)
        for copy in self._copies:
            yield _predicted(self._model, copy, second_half=True)


class _Predicted(NamedTuple):
    """values `[N, V]`: log-probabilities, or hidden states."""

    values: Tensor
    words: bool


@torch.no_grad()
def _predicted(model: Any, batch: Batch, *, second_half: bool) -> _Predicted:
    """What the model predicts at some of the real tokens of a batch."""

    def places(length: int) -> slice:
        first = length // 2 if second_half else 0
        return slice(first, None, max(1, (length - first) // ROWS))

    with evaluating(model), _some_words_only(model, places) as taken:
        output = (
            model(batch)
            if isinstance(batch, Tensor)
            else model(**batch)
            if isinstance(batch, Mapping)
            else model(*batch)
        )
    logits = getattr(output, "logits", None)
    values = output.last_hidden_state if logits is None else logits
    if values.dim() != 3:  # a class of each sequence
        return _Predicted(values.float().log_softmax(-1), words=True)
    length = taken[0] if taken else values.shape[1]
    real = _real(batch, length, values)[:, places(length)]
    values = values if taken else values[:, places(length)]
    values = values[real].float()
    return _Predicted(values if logits is None else values.log_softmax(-1), words=logits is not None)


@contextmanager
def _some_words_only(model: Any, places: Callable[[int], slice]) -> Iterator[list[int]]:
    """Words are predicted at some places only: all logits of a long text are larger than the model.

    Gives the length of the text, once it is known that words were predicted so.
    """
    taken: list[int] = []

    def pick(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = given[0]
        if hidden.dim() != 3:
            return given
        taken.append(hidden.shape[1])
        return (hidden[:, places(hidden.shape[1])], *given[1:])

    head = model.get_output_embeddings()
    hook = None if head is None else head.register_forward_pre_hook(pick)
    try:
        yield taken
    finally:
        if hook is not None:
            hook.remove()


def _real(batch: Batch, length: int, values: Tensor) -> Tensor:
    """bool `[B, length]`: which tokens are no padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == (len(values), length):
        return mask.bool().to(values.device)
    return values.new_ones(len(values), length, dtype=torch.bool)


def _divergence(exact: _Predicted, now: _Predicted) -> Tensor:
    """`[N]`."""
    was, values = exact.values, now.values
    if exact.words:
        return (torch.where(was > -torch.inf, was.exp() * (was - values), 0)).sum(-1)
    return (values - was).square().sum(-1) / was.square().sum(-1) / 2


def _mean(found: Sequence[Tensor]) -> float:
    return torch.cat(list(found)).double().mean().item()
