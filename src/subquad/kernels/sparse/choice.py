"""Which pages of keys a query attends to: those whose keys may have the largest products with it.

    bound(q, page) = sum_d max(q_d * largest k_d in the page, q_d * smallest k_d in the page)

No key of the page has a larger product with the query. This is the torch engine; `choice_operator.py` picks one.

Letters: B batch, K key heads, G query heads per key head, T queries, P pages of E keys, W pages that a query chooses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.sparse.torch import log_dtype

BOUNDS_AT_ONCE = 1 << 18  # they and what ranks them stay in the caches


class Extremes(NamedTuple):
    """The largest and the smallest number that keys of a page have in each dimension, `[B, K, P, D]`."""

    high: Tensor
    low: Tensor


@torch.no_grad()
def extremes(k: Tensor) -> Extremes:
    """Of pages k `[B, K, P, E, D]`, in float32 or float64."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    return Extremes(k.amax(3), k.amin(3))


def choose(q: Tensor, extremes: Extremes, candidates: Tensor, width: int) -> Tensor:
    """The pages of the largest bounds, int64 `[B, K, G, T, W]`; of equal ones the earlier. P stands for none.

    q `[B, K, G, T, D]`; candidates int64 `[B or 1, T]`: how many pages, from the first on, a query may choose from.

    Bounds are summed in float64: products of float32 numbers are exact there, so the order of summation, which
    differs between shapes and engines, decides between pages of equal bounds at most.
    """
    count, dtype = extremes.high.shape[2], log_dtype(q)
    keys = torch.cat([extremes.high.to(dtype), -extremes.low.to(dtype)], 3).mT  # [B, K, 2 D, P]
    chosen = candidates.new_full((*q.shape[:4], width), count)
    step = max(1, BOUNDS_AT_ONCE // (q.shape[0] * q.shape[1] * q.shape[2] * count))
    for start in range(0, q.shape[3], step):
        tile = slice(start, start + step)
        of_tile = candidates[:, None, None, tile, None]
        limit = min(count, max(0, int(of_tile.max())))
        best = _best(q[:, :, :, tile].to(dtype), keys[..., :limit], of_tile, width)
        chosen[:, :, :, tile, : best.shape[4]] = torch.where(best < of_tile, best, count)
    return chosen


def _best(q: Tensor, keys: Tensor, candidates: Tensor, width: int) -> Tensor:
    """`[B, K, G, n, W or fewer]` of q `[B, K, G, n, D]` and keys `[B, K, 2 D, P]`."""
    count = keys.shape[3]
    place = torch.arange(count, device=q.device)
    if count <= width:
        return place.expand(*q.shape[:4], -1)
    halves = torch.cat([q.relu(), (-q).relu()], -1)
    bounds = (halves.flatten(2, 3) @ keys).unflatten(2, q.shape[2:4])
    bounds = bounds.masked_fill_(place >= candidates, -torch.inf)
    found = bounds.topk(width + 1)  # which of equal numbers it takes is not said
    last, next_one = found.values[..., -2], found.values[..., -1]
    if bool(((last == next_one) & (next_one > -torch.inf)).any()):
        return bounds.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    return found.indices[..., :-1]
