"""Which token comes next."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """temperature: None for the likeliest token. top_k, top_p: None for all tokens. seed: of what is drawn."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


def chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """A token by its logits `[V]`, in float32 as `generate` does it: temperature first, then top_k, then top_p."""
    if sampling.temperature is None:
        return int(logits.float().argmax())
    return int(torch.multinomial(probabilities(logits, sampling.temperature, sampling), 1, generator=generator))


def probabilities(logits: Tensor, temperature: float, sampling: Sampling) -> Tensor:
    """Of all tokens `[V]`; zero for those that are left out."""
    logits = logits.float()
    logits = (logits - logits.max()) / temperature  # no temperature makes them infinite
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p is not None:
        logits = _likeliest(logits, sampling.top_p)
    return logits.softmax(-1)


def _likeliest(logits: Tensor, share: float) -> Tensor:
    """-inf for tokens behind those that make up the share; the likeliest one stays."""
    ordered, index = logits.sort(descending=True, stable=True)
    weights = ordered.softmax(-1)
    behind = weights.cumsum(-1) - weights >= share
    behind[0] = False
    return logits.masked_fill(torch.zeros_like(behind).scatter(0, index, behind), -torch.inf)
