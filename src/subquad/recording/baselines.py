"""Attention without features: the average of all visible values, and exact attention to near blocks and sinks alone.

Of whole calls in linear memory or by torch's kernels, of sampled rows by the matrix that is there already.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.mechanism import masked_softmax, normalised, repeat_heads
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.pairs import far_pairs, seen_pairs
from subquad.recording.samples import Sample

WINDOW = 64  # tokens per block of the near baseline, for layers without near blocks


def uniform_average(call: Call) -> Tensor:
    """The mean of all visible values, `[B, H, T, Dv]`."""
    keep = call.v.new_ones(call.v.shape[0], call.v.shape[2]) if call.key_mask is None else call.key_mask.to(call.v)
    v, keep = call.v * keep[:, None, :, None], keep[:, None, :, None]
    count, total = (x.cumsum(2) if call.causal else x.sum(2, keepdim=True) for x in (keep, v))
    return repeat_heads(total / count.clamp(min=1), call.q.shape[1]).expand(-1, -1, call.q.shape[2], -1)


def uniform_rows(sample: Sample) -> Tensor:
    """The same of sampled rows, `[1, H, R, Dv]`."""
    return normalised(sample.seen.to(sample.values.dtype)) @ sample.values


def near_attention(mechanism: FavorAttention, call: Call) -> Tensor:
    """Attention to near blocks and sinks alone, as if there were nothing else, `[B, H, T, Dv]`."""
    rows = torch.arange(call.q.shape[2], device=call.q.device)
    near = seen_pairs(call, rows) & ~far_pairs(mechanism, call, rows)
    k, v = (repeat_heads(x, call.q.shape[1]) for x in (call.k, call.v))
    empty = ~near.any(-1, keepdim=True)  # rows of padding; a softmax of nothing is NaN
    return F.scaled_dot_product_attention(call.q, k, v, attn_mask=near | empty, scale=call.scale)


def near_rows(mechanism: FavorAttention, sample: Sample) -> Tensor:
    """The same of sampled rows, `[1, H, R, Dv]`; in blocks of WINDOW if the layer has none."""
    near = sample.seen & ~far_pairs(_with_window(mechanism), sample.call, sample.rows)
    return masked_softmax(sample.logits, near) @ sample.values


def _with_window(mechanism: FavorAttention) -> FavorAttention:
    """A layer with near blocks: this one, if it has any."""
    if mechanism.options.near:
        return mechanism
    return FavorAttention(mechanism.head_dim, 1, near=WINDOW, sinks=mechanism.options.sinks)
