"""The calls of a model's attention, layer by layer, within a memory budget."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from torch import nn

from subquad.checks import recording as checks
from subquad.mechanism import Mechanism
from subquad.recording.calls import Call, Layer
from subquad.recording.progress import Tell, silent
from subquad.recording.stream import Batch, Wanted, every, stream

MEMORY = 2**31  # bytes of calls that are kept at once


class LayerCalls(NamedTuple):
    """An attention layer with all its calls. mechanism: None for attention of Hugging Face."""

    name: str
    mechanism: Mechanism | None
    calls: list[Call]


class Recording:
    """The wanted layers of a model that were called; iterating gives each of them with all its calls.

    The model runs over all batches at once, and again where the calls of all layers are larger than the budget: for the
    layers that are left, as often as it takes. It is changed while it runs only, never between two layers.

    Args:
        batches: what the model takes: tensors, mappings (called as `model(**batch)`) or tuples (`model(*batch)`).
            An iterator is read once; tokens are small, so all batches are kept.
        op: begins the errors.
        exact: layers answer with exact attention, without computing their own output; it is kept with the call.
        wanted: layers to record; others only run.
        memory: bytes of calls to keep at once; one layer is always kept as a whole.
        tell: called after every batch of every run.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        *,
        op: str,
        exact: bool,
        wanted: Wanted = every,
        memory: float = MEMORY,
        tell: Tell = silent,
    ) -> None:
        self.batches = checks.batches(op, batches)
        self._memory = checks.memory(op, memory)
        self._keep_outputs = exact
        self._stream = partial(stream, model, self.batches, op=op, exact=exact, tell=tell)
        self.layers: list[Layer] = self._run(wanted)
        checks.something_recorded(op, model, len(self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCalls]:
        for place, layer in enumerate(self.layers):
            if layer.name not in self._kept.calls:
                left = {other.name for other in self.layers[place:]}
                self._kept.calls.clear()  # before the model runs again
                self._run(lambda other, left=left: other.name in left, needed=layer.name)
            yield LayerCalls(*layer, self._kept.calls.pop(layer.name))

    def _run(self, wanted: Wanted, needed: str | None = None) -> list[Layer]:
        """Layers that were called, in order, whether their calls could be kept or not."""
        kept = self._kept = _Kept(self._memory, needed)

        def observe(layer: Layer, call: Call) -> None:
            kept.add(layer, call if self._keep_outputs else call.replace())

        layers = self._stream(observe, wanted=wanted)
        return [layer for layer in layers if layer.name in kept.calls or layer.name in kept.dropped]


class _Kept:
    """Calls of as many layers as fit: those of the layer that was called last go, but never those of `needed`."""

    def __init__(self, memory: float, needed: str | None) -> None:
        self.memory, self.needed, self.nbytes = memory, needed, 0
        self.calls: dict[str, list[Call]] = {}
        self.dropped: set[str] = set()

    def add(self, layer: Layer, call: Call) -> None:
        if layer.name in self.dropped:
            return
        self.calls.setdefault(layer.name, []).append(call.alone())
        self.nbytes += call.nbytes
        while self.nbytes > self.memory and len(self.calls) > 1:
            last = next(name for name in reversed(self.calls) if name != self.needed)
            self.nbytes -= sum(dropped.nbytes for dropped in self.calls.pop(last))
            self.dropped.add(last)
