"""Time and memory of reading a prompt and of every token after it, exact and converted."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.bench.bill.rows import CONVERTED, EXACT, ROWS
from subquad.bench.bill.texts import last_words
from subquad.recording.stream import evaluating

NEW, REPEATS = 8, 3


class Cost(NamedTuple):
    """Behind `length` tokens: seconds of reading them, seconds of one more token (the best of some repeats, and all of
    them), bytes of the cache."""

    row: str
    length: int
    prefill: float
    token: float
    samples: tuple[float, ...]
    nbytes: int


@torch.inference_mode()
def costs(
    model: Any, text: Tensor, lengths: Sequence[int], tell: Callable[[int, int], object] = lambda *_: None
) -> Iterator[Cost]:
    """text `[1, T]` is repeated where it is too short. Exact and converted take turns."""
    for number, length in enumerate(lengths):
        ids = text.repeat(1, -(-length // text.shape[1]))[:, :length]
        caches, prefill = {}, {}
        for row in (EXACT, CONVERTED):
            with ROWS[row](model, 0), evaluating(model), last_words(model, 1):
                begun = time.perf_counter()
                caches[row] = model(ids, use_cache=True).past_key_values
                prefill[row] = time.perf_counter() - begun
        samples: dict[str, list[float]] = {EXACT: [], CONVERTED: []}
        for repeat in range(REPEATS + 1):  # the first warms up
            for row, cache in caches.items():
                with ROWS[row](model, 0), evaluating(model):
                    seconds = _decode(model, copy.deepcopy(cache), ids)
                if repeat:
                    samples[row].append(seconds)
        for row in (EXACT, CONVERTED):
            times = tuple(samples[row])
            yield Cost(row, length, prefill[row], min(times), times, cache_bytes(caches[row]))
        tell(number + 1, len(lengths))


def _decode(model: Any, cache: Any, ids: Tensor) -> float:
    """Seconds per token."""
    begun = time.perf_counter()
    for i in range(NEW):
        model(ids[:, i % ids.shape[1]][:, None], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - begun) / NEW


def cache_bytes(cache: Any) -> int:
    """Of ours, or of keys and values."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
