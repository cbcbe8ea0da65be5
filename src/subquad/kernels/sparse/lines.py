"""Attention along lines: queries meet keys of their own line only. Cuts lines into tiles of the sparse engines.

Letters as in `torch.py`, and X lines, G query heads per key head, T queries and S keys of a line.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.sparse.operator import sparse_attention
from subquad.kernels.sparse.torch import ABSENT_KEY, Bounds, Pairs

LARGEST, SMALLEST = 64, 16  # tokens of a tile: larger ones compute more hidden pairs, smaller ones make small products
PADDING = -1  # the number of a block that does not exist


class Lines(NamedTuple):
    """q `[X, G, T, D]`, k `[X, S, D]`, v `[X, S, Dv]`, float32 or float64."""

    q: Tensor
    k: Tensor
    v: Tensor


class Part(NamedTuple):
    """Output and log-normaliser over some of the keys; `merge` of `torch.py` puts parts together."""

    out: Tensor
    log_normaliser: Tensor


def padded(x: Tensor, multiple: int) -> Tensor:
    """`[..., T, D]` with zeros behind the last token, up to a multiple."""
    short = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, short)) if short else x


def causal_band(lines: Lines, low: int, high: int, scale: float) -> Part:
    """Query t sees keys t - high .. t - low of its line, low >= 0. A line may end with absent tokens."""
    length = lines.q.shape[2]
    tile = _tile_for(length, high)
    tiles = -(-length // tile)
    own, inside = torch.arange(tiles, device=lines.q.device), torch.arange(tile, device=lines.q.device)
    steps = torch.arange(min(tiles - 1, -(-high // tile)) + 1, device=lines.q.device)
    # every tile sees the same picture: itself first, then one block back, and so on
    q_place = inside.repeat(lines.q.shape[1])
    k_place = (inside - tile * steps[:, None]).flatten()
    meets = (own[:, None] - steps).clamp(min=PADDING)
    return _attend(lines, meets, (q_place, k_place), Bounds(low, high), scale, tile, tile)


def symmetric_band(lines: Lines, reach: int, counts: Tensor | None, scale: float, skip_self: bool = False) -> Part:
    """Query t sees keys t - reach .. t + reach of its line.

    counts: tokens that are there, the first of a line; one number for each line, or for neighbours that share it.
    """
    length = lines.q.shape[2]
    tile = _tile_for(length, reach)
    tiles, back = -(-length // tile), -(-reach // tile)
    width = min(tiles, 2 * back + 1)
    first = (torch.arange(tiles, device=lines.q.device) - back).clamp(0, tiles - width)
    meets = first[:, None] + torch.arange(width, device=lines.q.device)
    place = torch.arange(length, device=lines.q.device)[None]
    k_place = place if counts is None else torch.where(place < counts[:, None], place, ABSENT_KEY)
    bounds = Bounds(-min(reach, length), min(reach, length), skip_self=skip_self)
    return _attend(lines, meets, _labels(lines, place, k_place, tile, tile), bounds, scale, tile, tile)


def cross(
    lines: Lines, q_place: Tensor, k_place: Tensor, bounds: Bounds, scale: float, seen: Callable[[int], int]
) -> Part:
    """Queries and keys with places `[.., T]` and `[.., S]`: a row for each line, or for neighbours that share it.

    seen: of a query, how many keys it may see at most, counted from the first; must not fall from query to query.
    """
    (_, _, length, _), keys = lines.q.shape, lines.k.shape[1]
    tile, block = _even(length), _even(keys)
    last = torch.tensor([seen(min(start + tile, length) - 1) for start in range(0, length, tile)])
    blocks = torch.arange(-(-keys // block))
    meets = torch.where(blocks * block < last[:, None], blocks, PADDING).to(lines.q.device)
    return _attend(lines, meets, _labels(lines, q_place, k_place, tile, block), bounds, scale, tile, block)


def _tile_for(length: int, reach: int) -> int:
    """Windows that are shorter than a tile make tiles smaller, down to a limit."""
    return max(min(SMALLEST, length), _even(min(length, reach + 1)))


def _even(length: int) -> int:
    """The size of pieces that cut `length` evenly into as few as may be."""
    return -(-length // -(-length // LARGEST))


def _labels(lines: Lines, q_place: Tensor, k_place: Tensor, tile: int, block: int) -> tuple[Tensor, Tensor]:
    """Places `[N * X, G * C]` and `[X * J, E]`, tile by tile as the engine has them."""
    count, groups = lines.q.shape[:2]
    q_place, k_place = (place.repeat_interleave(count // place.shape[0], 0) for place in (q_place, k_place))
    q_place = _tiles(q_place[:, None, :, None].expand(-1, groups, -1, -1), tile).squeeze(-1)
    k_place = F.pad(k_place, (0, -k_place.shape[1] % block), value=ABSENT_KEY).reshape(-1, block)
    return q_place, k_place


def _attend(
    lines: Lines, meets: Tensor, places: tuple[Tensor, Tensor], bounds: Bounds, scale: float, tile: int, block: int
) -> Part:
    """meets `[N, W]`: blocks that a tile meets, the same in every line."""
    (count, groups, length, _), (q, *keys) = lines.q.shape, lines
    k, v = (padded(x, block).reshape(-1, block, x.shape[2]) for x in keys)
    of_line = k.shape[0] // count * torch.arange(count, device=q.device)[:, None]
    blocks = torch.where(meets[:, None] == PADDING, k.shape[0], meets[:, None] + of_line).flatten(0, 1)
    pairs = Pairs(blocks, *(place.to(torch.int32) for place in places))
    out, log_normaliser = sparse_attention(_tiles(q, tile), k, v, pairs, bounds, scale)
    return Part(*(_lines(x, count, groups, tile)[:, :, :length] for x in (out, log_normaliser)))


def _tiles(x: Tensor, tile: int) -> Tensor:
    """`[X, G, T, D] -> [N * X, G * C, D]`: query heads of one key head share a tile; tile by tile, not line by line."""
    count, groups, _, dim = x.shape
    x = padded(x, tile).reshape(count, groups, -1, tile, dim)
    return x.permute(2, 0, 1, 3, 4).reshape(-1, groups * tile, dim)


def _lines(x: Tensor, count: int, groups: int, tile: int) -> Tensor:
    """Inverse of `_tiles` but for the padding: `[N * X, G * C, ...] -> [X, G, N * C, ...]`."""
    x = x.reshape(-1, count, groups, tile, *x.shape[2:])
    return x.permute(1, 2, 0, *range(3, x.dim())).flatten(2, 3)
