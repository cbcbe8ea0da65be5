"""What every candidate costs in every layer: the model runs, features are fitted, errors are priced."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.calibration.fitting import split
from subquad.checks import convert as checks
from subquad.conversion.candidates import Candidate, Judges, Priced, priced
from subquad.conversion.kept import Kept, Settings
from subquad.conversion.probe import copied
from subquad.conversion.sensitivity import PIECE, Sensitivity, sensitivity
from subquad.conversion.swap import attention_modules, module_scale
from subquad.features.draws import derived_seed
from subquad.measure import give_back_free_memory
from subquad.recording.calls import Call
from subquad.recording.progress import Tell
from subquad.recording.record import Recording
from subquad.recording.stream import Batch

MEMORY = 3 * 2**29  # bytes of calls at once: with a model of 500 MB all of it stays below 4 GB
WHOLE = sys.maxsize  # tokens of a copy: as many as its batch has


class Texts:
    """What a model is converted with.

    Attributes:
        batches: features are fitted to four fifths of them.
        held: the others, which candidates are judged by.
        copies: these once more, read twice: what copying costs is judged by the second time. None for a model that
            looks both ways: it sees the second time when it reads the first.
    """

    def __init__(self, batches: Sequence[Batch], *, causal: bool) -> None:
        self.batches, self.held = batches, split(batches)[1]
        self.copies = _copies(self.held, WHOLE) if causal else []
        self._short_copies = _copies(batches, PIECE) if self.copies else []

    def sensitivities(self, model: Any, kept: Kept, seed: int, tell: Tell) -> tuple[Sensitivity, Sensitivity]:
        """Of the model to errors, where it reads, and where it reads again."""
        reading = kept.tensors("sensitivity", lambda: sensitivity(model, self.batches, seed=seed, tell=tell))
        if not self._short_copies:
            return reading, reading
        copying = kept.tensors(
            "copying", lambda: sensitivity(model, self._short_copies, seed=seed, tell=tell, second_half=True)
        )
        return reading, copying


def _copies(batches: Sequence[Batch], longest: int) -> list[Tensor]:
    return [copy for batch in batches if (copy := copied(batch, longest)) is not None]


def priced_layers(
    model: Any,
    texts: Texts,
    settings: Settings,
    names: Sequence[str],
    found: Sequence[Candidate],
    kept: Kept,
    tell: Tell,
) -> dict[str, Priced]:
    """By the names of the layers: as far as it is not known from an earlier try."""
    known = {name: kept.layer(name) for name in names}
    left = {name for name in names if known[name].missing(found)}
    if not left:
        return known
    reading, copying = texts.sensitivities(model, kept, settings.seed, tell)
    give_back_free_memory()  # of backward passes: as much as all calls take
    given = [*texts.batches, *texts.copies]
    recording = Recording(
        model, given, op="convert", exact=True, wanted=lambda layer: layer.name in left, memory=MEMORY, tell=tell
    )
    modules = dict(attention_modules(model))
    for layer in recording:
        number = names.index(layer.name)
        tell(f"fitting {layer.name}", number, len(names))
        calls = _by_batch([_as_swapped(call, modules[layer.name]) for call in layer.calls], len(given))
        fit, held = (_joined(some) for some in split(calls[: len(texts.batches)]))
        judges = Judges(held, reading[layer.name], _joined(calls[len(texts.batches) :]), copying[layer.name])
        how = {"layer": number, "steps": settings.steps, "seed": derived_seed(settings.seed, number)}
        so_far, dtype = known[layer.name], layer.calls[0].k.dtype
        more = priced(so_far.missing(found), fit, judges, dtype=dtype, **how)
        checks.finite_prices(layer.name, more.prices)
        known[layer.name] = so_far.joined(more)
        kept.put(layer.name, known[layer.name])
    return known


def _as_swapped(call: Call, module: Any) -> Call:
    """In float32 at least, and as a swapped layer gets it: some models scale their queries before attention."""
    call = call.precise()
    scale = module_scale(module, call.q.shape[-1])
    return call if scale == call.scale else call.replace(q=call.q * (call.scale / scale), scale=scale)


def _by_batch(calls: Sequence[Call], batches: int) -> list[Sequence[Call]]:
    """A layer may be called several times for each batch."""
    times = len(calls) // batches
    return [calls[i : i + times] for i in range(0, len(calls), times)]


def _joined(groups: Sequence[Sequence[Call]]) -> list[Call]:
    return [call for group in groups for call in group]
