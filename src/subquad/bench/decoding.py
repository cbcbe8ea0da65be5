"""What one more token costs after a context of some length."""

import copy
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.measure import Timing


class DecodeCost(NamedTuple):
    """Seconds per token (one sample per repeat) and bytes of the cache behind `context` tokens."""

    context: int
    timing: Timing
    cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.timing.median


@torch.inference_mode()
def decode_costs(
    model: Any, tokens: Tensor, contexts: Sequence[int], *, new_tokens: int = 32, repeats: int = 5
) -> list[DecodeCost]:
    """One at a time, `new_tokens` after each context of `tokens` `[T]`; contexts take turns, so that a slow spell of
    the machine hits all of them. `model` is any causal model of `subquad.models`."""
    caches = [model(tokens[None, :size], use_cache=True).past_key_values for size in contexts]
    samples: list[list[float]] = [[] for _ in contexts]
    sizes = [cache.nbytes() for cache in caches]
    for repeat in range(repeats + 1):  # the first warms up
        for place, cache in enumerate(caches):
            cache = copy.deepcopy(cache)
            begun = time.perf_counter()
            for i in range(new_tokens):
                model(tokens[None, i : i + 1], past_key_values=cache, use_cache=True)
            if repeat:
                samples[place].append((time.perf_counter() - begun) / new_tokens)
    results = zip(contexts, samples, sizes, strict=True)
    return [DecodeCost(context, Timing(tuple(times)), size) for context, times, size in results]
