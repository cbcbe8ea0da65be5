"""Pairs of a query and a key: which are seen, and which are left to features."""

import torch
from torch import Tensor

from subquad.mechanism import real_index
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call


def seen_pairs(call: Call, rows: Tensor) -> Tensor:
    """bool `[B or 1, 1, R, S]`: keys that the queries `rows` may look at; rows of masked tokens see none."""
    keys = torch.arange(call.k.shape[2], device=rows.device)
    seen = keys <= rows[:, None] if call.causal else torch.ones_like(keys <= rows[:, None])
    seen = seen[None, None] & call.real[:, None, rows, None]
    return seen if call.key_mask is None else seen & call.key_mask[:, None, None]


def far_pairs(mechanism: FavorAttention, call: Call, rows: Tensor) -> Tensor:
    """bool `[B or 1, 1, R, S]`: pairs left to the features, were there no masks."""
    k_index = real_index(call.key_mask, call.k)
    q_index = k_index[:, rows] if mechanism.options.near else rows[None]
    return ~mechanism.exact_pairs(q_index, k_index)
