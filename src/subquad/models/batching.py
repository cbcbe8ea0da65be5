"""Sequences of any lengths in batches with little padding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """places: in the original order. ids, mask `[B, T]`, padded on the right."""

    places: list[int]
    ids: Tensor
    mask: Tensor


def batches_by_length(sequences: Sequence[Tensor], *, batch_tokens: int, pad: int) -> Iterator[Batch]:
    """Similar lengths together, longest first (memory troubles show at once), about `batch_tokens` each."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    while order:
        rows = max(1, batch_tokens // max(1, len(sequences[order[0]])))
        places, order = order[:rows], order[rows:]
        chosen = [sequences[i] for i in places]
        lengths = torch.tensor([len(sequence) for sequence in chosen])
        ids = torch.nn.utils.rnn.pad_sequence(chosen, True, pad)
        yield Batch(places, ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long())
