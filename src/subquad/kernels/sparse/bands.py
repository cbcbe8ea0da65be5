"""Attention to a band of neighbours, every `dilation`-th of them: blocks of queries against the blocks around them.

Tokens `dilation` apart form a class; within a class the band has no gaps. Classes, heads and sequences become lines of
blocks, and a tile of queries meets the few blocks of its line that its band can reach.

Letters as in `torch.py`, and B batch, H query heads, K key heads, G = H / K, T queries, S keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.sparse.operator import sparse_attention
from subquad.kernels.sparse.torch import ABSENT_KEY, ABSENT_QUERY, UNLIMITED, Bounds, Pairs

LARGEST_BLOCK, SMALLEST_BLOCK = 64, 16


class Band(NamedTuple):
    """Keys from `back` steps before a query to `ahead` steps after it, a step being `dilation` tokens."""

    back: int
    ahead: int
    dilation: int

    def within(self, length: int) -> "Band":
        """The same band for so many tokens: none of them is further away, and no memory is for those that are."""
        return Band(*(min(steps, length) for steps in self))


def band_attention(
    q: Tensor, k: Tensor, v: Tensor, band: Band, alive: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, Dv]` and log-normaliser `[B, H, T]`.

    q `[B, H, T, D]` are the last T tokens of k `[B, K, S, D]` and v; alive `[B or 1, S]` bool, or None: all keys.
    """
    (batch, heads, length, _), key_heads, past = q.shape, k.shape[1], k.shape[2] - q.shape[2]
    band = band.within(k.shape[2])
    groups, reach = heads // key_heads, max(band.back, band.ahead)
    block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, reach), length)
    unit = block * band.dilation
    left, right = -past % unit, -length % unit
    if left or right:
        alive = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if alive is None else alive
        alive = F.pad(alive, (left, right))
    q = F.pad(q, (0, 0, 0, right))
    k, v = (F.pad(x, (0, 0, left, right)) for x in (k, v))
    line = k.shape[2] // unit  # key blocks of one class
    before, after = (-(-steps // block) for steps in (band.back, band.ahead))
    tiles = _meetings(batch * key_heads * band.dilation, line, q.shape[2] // unit, before, after, k)
    places = torch.arange(block * (before + 1 + after), dtype=torch.int32, device=q.device)
    pairs = Pairs(
        blocks=tiles,
        q_place=places[before * block : (before + 1) * block].repeat(groups),
        k_place=places,
        alive=None if alive is None else _lines_of(alive, batch, key_heads, band.dilation, block),
    )
    bounds = Bounds(place_low=-band.ahead, place_high=band.back)
    keys, values = (_key_blocks(x, band.dilation, block) for x in (k, v))
    out, log_normaliser = sparse_attention(
        _query_tiles(q, groups, band.dilation, block), keys, values, pairs, bounds, scale
    )
    shape = (batch, key_heads, band.dilation, -1, groups, block)
    return _to_tokens(out, shape)[:, :, :length], _to_tokens(log_normaliser[..., None], shape)[:, :, :length, 0]


def _meetings(lines: int, line: int, tiles: int, before: int, after: int, like: Tensor) -> Tensor:
    """`[lines * tiles, before + 1 + after]`: the last `tiles` blocks of every line, and which blocks they meet."""
    own = torch.arange(line - tiles, line, device=like.device)
    met = own[:, None] + torch.arange(-before, after + 1, device=like.device)
    first = torch.arange(lines, device=like.device)[:, None, None] * line
    return torch.where((met >= 0) & (met < line), first + met, lines * line).flatten(0, 1)


def _query_tiles(q: Tensor, groups: int, dilation: int, block: int) -> Tensor:
    """`[B, H, T, D] -> [B * K * dilation * tiles, groups * block, D]`."""
    q = q.unflatten(1, (-1, groups)).unflatten(3, (-1, block, dilation))  # B K G tiles C dilation D
    return q.permute(0, 1, 5, 3, 2, 4, 6).flatten(4, 5).flatten(0, 3).contiguous()


def _key_blocks(x: Tensor, dilation: int, block: int) -> Tensor:
    """`[B, K, S, D] -> [B * K * dilation * line, block, D]`."""
    x = x.unflatten(2, (-1, block, dilation))  # B K line C dilation D
    return x.permute(0, 1, 4, 2, 3, 5).flatten(0, 3).contiguous()


def _lines_of(alive: Tensor, batch: int, key_heads: int, dilation: int, block: int) -> Tensor:
    """`[B or 1, S] -> [B * K * dilation * line, block]`."""
    alive = alive.unflatten(1, (-1, block, dilation)).permute(0, 3, 1, 2)[:, None]
    return alive.expand(batch, key_heads, -1, -1, -1).flatten(0, 3)


def _to_tokens(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Tiles back to `[B, H, T, D]`; shape: B, K, dilation, tiles, groups, block."""
    x = x.unflatten(1, shape[4:]).unflatten(0, shape[:4])  # B K dilation tiles G C D
    return x.permute(0, 1, 4, 3, 5, 2, 6).flatten(3, 5).flatten(1, 2)


# A few keys for all queries, all keys for a few queries ---------------------------------------------------------------


def attend_to_few(
    q: Tensor, k: Tensor, v: Tensor, q_place: Tensor, k_place: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As `band_attention`, for k `[B, K, few, D]`. Places `[B or 1, T]` and `[B, few]`; ABSENT_KEY for no key."""
    batch, heads, length, _ = q.shape
    key_heads, block = k.shape[1], min(LARGEST_BLOCK, q.shape[2])
    groups, right = heads // key_heads, -length % block
    tiles = (length + right) // block
    q_place = F.pad(q_place.to(torch.int32).expand(batch, -1), (0, right), value=ABSENT_QUERY)
    q_place = q_place.view(batch, 1, tiles, 1, block).expand(-1, key_heads, -1, groups, -1)
    sequence = torch.arange(batch * key_heads, device=q.device).repeat_interleave(tiles)
    pairs = Pairs(
        blocks=sequence[:, None],
        q_place=q_place.reshape(-1, groups * block),
        k_place=k_place.to(torch.int32).repeat_interleave(key_heads, 0),
    )
    bounds = Bounds(place_low=0 if causal else -UNLIMITED)
    tiled = _query_tiles(F.pad(q, (0, 0, 0, right)), groups, 1, block)
    out, log_normaliser = sparse_attention(tiled, k.flatten(0, 1), v.flatten(0, 1), pairs, bounds, scale)
    shape = (batch, key_heads, 1, tiles, groups, block)
    return _to_tokens(out, shape)[:, :, :length], _to_tokens(log_normaliser[..., None], shape)[:, :, :length, 0]


def few_attend(q: Tensor, k: Tensor, v: Tensor, q_place: Tensor, k_place: Tensor, causal: bool, scale: float) -> Tensor:
    """Output `[B, H, few, Dv]` of q `[B, H, few, D]` over all keys. Places `[B, few]` and `[B, S]`, absent or not."""
    batch, heads, few, _ = q.shape
    key_heads, block = k.shape[1], min(LARGEST_BLOCK, k.shape[2])
    groups, right = heads // key_heads, -k.shape[2] % block
    line = (k.shape[2] + right) // block
    k_place = F.pad(k_place.to(torch.int32), (0, right), value=ABSENT_KEY).view(batch, 1, line, block)
    pairs = Pairs(
        blocks=torch.arange(batch * key_heads * line, device=q.device).view(-1, line),
        q_place=q_place.to(torch.int32)[:, None, None].expand(-1, key_heads, groups, -1).reshape(-1, groups * few),
        k_place=k_place.expand(-1, key_heads, -1, -1).reshape(-1, block),
    )
    bounds = Bounds(place_low=0 if causal else -UNLIMITED)
    rows = q.unflatten(1, (key_heads, groups)).flatten(2, 3).flatten(0, 1)
    keys, values = (_key_blocks(F.pad(x, (0, 0, 0, right)), 1, block) for x in (k, v))
    out, _ = sparse_attention(rows.contiguous(), keys, values, pairs, bounds, scale)
    return out.view(batch, heads, few, -1)
