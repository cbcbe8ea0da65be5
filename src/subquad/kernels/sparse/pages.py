"""Attention to pages of keys: to the nearest ones, and to those that each query chose.

Letters as in `choice.py`, H = K * G query heads, and F pages of sinks, which are in front of the others and
may end with places that hold no key. A page is a block of the sparse engines.
"""

import torch
from torch import Tensor

from subquad.kernels.sparse.operator import sparse_attention
from subquad.kernels.sparse.torch import ABSENT_KEY, Bounds, Pairs


def near_pages(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, sees: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Of a query to its own page up to itself, to `near` pages before it and to all sinks: `[B, H, n * E, Dv]`, and
    log-normalisers. sees: how many sinks, and `near`.

    q `[B, H, n * E, D]`: n pages of queries, the first of them page `first` `[B or 1]`; k, v `[B, K, F + P, E, ..]`.
    """
    (batch, key_heads, count, page), (heads, length), (sinks, near) = k.shape[:4], q.shape[1:3], sees
    groups, tiles, front = heads // key_heads, length // page, -(-sinks // page)
    steps = torch.arange(min(near, count - front - 1) + 1, device=q.device)
    before = first[:, None, None] + torch.arange(tiles, device=q.device)[:, None] - steps
    of_sinks = torch.arange(front, device=q.device).expand(*before.shape[:2], -1)
    met = torch.cat([of_sinks, torch.where(before >= 0, front + before, count)], 2)
    inside, sink = torch.arange(page, device=q.device), torch.arange(front * page, device=q.device)
    k_place = torch.cat([torch.where(sink < sinks, 0, ABSENT_KEY), (inside - page * steps[:, None]).flatten()])
    pairs = Pairs(  # every tile sees the same picture: the sinks, its own page, the one before, and so on
        blocks=_blocks(met[:, None].expand(batch, key_heads, -1, -1), count).flatten(0, 2),
        q_place=inside.repeat(groups).to(torch.int32),
        k_place=k_place.to(torch.int32),
    )
    tiled = q.reshape(batch, key_heads, groups, tiles, page, -1).transpose(2, 3).reshape(-1, groups * page, q.shape[3])
    out, log_normaliser = sparse_attention(tiled, k.flatten(0, 2), v.flatten(0, 2), pairs, Bounds(0), scale)
    return _of_tokens(out, q, key_heads, tiles), _of_tokens(log_normaliser[..., None], q, key_heads, tiles)[..., 0]


def chosen_pages(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, sinks: int, scale: float) -> tuple[Tensor, Tensor]:
    """Of a query to all keys of its pages chosen `[B, K, G, T, W]`: `[B, H, T, Dv]`, and log-normalisers.

    q `[B, H, T, D]`, k, v `[B, K, F + P, E, ..]`. Every query is a tile of its own.
    """
    count, page = k.shape[2:4]
    places = torch.zeros(chosen.shape[4] * page, dtype=torch.int32, device=q.device)  # all pairs count
    behind_sinks = chosen.flatten(2, 3) + -(-sinks // page)
    pairs = Pairs(_blocks(behind_sinks, count).flatten(0, 2), places[:1], places)
    rows = q.reshape(-1, 1, q.shape[3])
    out, log_normaliser = sparse_attention(rows, k.flatten(0, 2), v.flatten(0, 2), pairs, Bounds(), scale)
    return out.view(*q.shape[:3], -1), log_normaliser.view(q.shape[:3])


def _blocks(pages: Tensor, count: int) -> Tensor:
    """Page numbers `[B, K, n, W]` as those of blocks of all heads; `count` or more is no page."""
    heads = torch.arange(pages.shape[0] * pages.shape[1], device=pages.device).view(*pages.shape[:2], 1, 1)
    return torch.where(pages < count, heads * count + pages, heads.numel() * count)


def _of_tokens(x: Tensor, q: Tensor, key_heads: int, tiles: int) -> Tensor:
    """`[B * K * tiles, G * E, D] -> [B, H, tiles * E, D]`."""
    x = x.unflatten(0, (q.shape[0], key_heads, tiles)).unflatten(3, (q.shape[1] // key_heads, -1))
    return x.transpose(2, 3).reshape(*q.shape[:3], -1)
