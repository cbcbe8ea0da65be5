"""Sampled rows of calls: exact attention is computed for those only, in float32 or better."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.features.draws import derived_seed
from subquad.mechanism import repeat_heads
from subquad.recording.calls import Call
from subquad.recording.pairs import seen_pairs


class Sample(NamedTuple):
    """One sequence, some of its real rows, and what exact attention makes of them."""

    call: Call  # of batch size 1
    rows: Tensor  # [R]
    seen: Tensor  # bool [1, 1, R, S]
    logits: Tensor  # [1, H, R, S]
    values: Tensor  # [1, H, S, Dv]: 0 where a key is masked, as 0 * NaN is NaN


def samples(calls: Sequence[Call], rows: int, seed: int) -> Iterator[Sample]:
    """Every sequence with at most `rows` of its real rows: always the same ones."""
    for number, batch in enumerate(calls):
        for index in range(len(batch.q)):
            call = batch.sequences(torch.tensor([index], device=batch.q.device))
            places = call.real[0].nonzero()[:, 0]
            generator = torch.Generator("cpu").manual_seed(derived_seed(seed, number, index))
            chosen = torch.randperm(len(places), generator=generator)[:rows].sort().values
            if len(chosen):
                yield _sample(call, places[chosen.to(places.device)])


def _sample(call: Call, rows: Tensor) -> Sample:
    logits = call.precise().logits(rows)
    v = call.v if call.key_mask is None else call.v.masked_fill(~call.key_mask[:, None, :, None], 0)
    return Sample(call, rows, seen_pairs(call, rows), logits, repeat_heads(v, call.q.shape[1]).to(logits.dtype))
