"""Text that is read twice: where it comes again, a model that can look far back copies it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.recording.stream import Batch


def copied(batch: Batch, longest: int) -> Tensor | None:
    """int64 `[B, 2n]`: the first n tokens of each sequence twice; None of a batch that holds no tokens.

    n is half of what all sequences of the batch have, padding left out, and half of `longest` at the most.

    Example:
        >>> copied(torch.arange(7)[None], longest=6)
        tensor([[0, 1, 2, 0, 1, 2]])
    """
    ids, mask = _tokens(batch)
    if ids is None:
        return None
    real = torch.ones_like(ids) if mask is None else mask.bool().long()
    count = min(longest, int(real.sum(1).amin())) // 2
    first = real.argsort(dim=1, descending=True, stable=True)[:, :count]
    return ids.gather(1, first).repeat(1, 2) if count else None


def _tokens(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Token ids `[B, T]` of a batch, and which of them are real."""
    mask: Any = None
    if isinstance(batch, Mapping):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    else:
        ids = batch if isinstance(batch, Tensor) else batch[0]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return None, None
    return ids, mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
