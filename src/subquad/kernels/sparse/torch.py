"""Exact attention to some of the keys, in blocks: the engine of windows, hashing, clusters and strides.

Which pairs meet is data. Queries come in tiles, keys in blocks; a tile meets some of the blocks, and within them a pair
counts if its labels say so. Results come with the logarithm of their normaliser, so that `merge`
can put parts together that saw different keys. Logits of a few tiles are alive at a time, forward and backward.

Letters: N tiles of C queries, J blocks of E keys, W blocks that a tile meets, R rounds, D head dim, Dv value dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.precision import bounded_

PAIRS_AT_ONCE = 1 << 19
UNLIMITED = 1 << 28  # more than any place or code
ABSENT_QUERY, ABSENT_KEY = -(1 << 29), 1 << 29  # labels of what is not there: their difference is below every range


class Pairs(NamedTuple):
    """Tiles, blocks and labels.

    blocks: int64 `[N, W]`, the key blocks that a tile meets; J is padding. Columns of J at the end cost nothing
        where tiles next to each other have them, so tiles are best sorted by how many blocks they meet.
    q_place: int32 `[N, C]`, k_place `[J, E]`; or `[C]` and `[W * E]` where all tiles look alike (then no codes).
    q_code: int32 `[N, C, R]`, k_code `[J, E, R]` for R rounds, or None.
    alive: bool `[J, E]` keys that are there, or None: all. For tiles that look alike; others have absent labels.
    """

    blocks: Tensor
    q_place: Tensor
    k_place: Tensor
    q_code: Tensor | None = None
    k_code: Tensor | None = None
    alive: Tensor | None = None


class Bounds(NamedTuple):
    """A pair counts if query minus key lies between the bounds, both included: of places, and of codes in `round`.

    A pair that meets in several rounds counts in the first of them: codes of rounds before `round` must lie outside
    the bounds, later ones are not looked at. Where all pairs of a tile and its blocks meet in `round` anyway, the
    codes of earlier rounds are enough.
    """

    place_low: int = -UNLIMITED
    place_high: int = UNLIMITED
    code_low: int = 0
    code_high: int = 0
    round: int = 0
    skip_self: bool = False


class Inputs(NamedTuple):
    """q `[N, C, D]`, k `[J, E, D]`, v `[J, E, Dv]`, all float32 or float64; absent tokens hold finite numbers."""

    q: Tensor
    k: Tensor
    v: Tensor


def log_dtype(q: Tensor) -> torch.dtype:
    """Of log-normalisers: next to a logit of 1e4, float32 has no digits left for the logarithm of a sum."""
    return torch.float32 if q.device.type == "mps" and q.dtype != torch.float64 else torch.float64


def forward(inputs: Inputs, pairs: Pairs, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
    """Output `[N, C, Dv]` and log-normaliser `[N, C]`; zeros and -inf for a row that sees no key."""
    q, k, v = inputs
    out, log_normaliser = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=log_dtype(q))
    for tile in _tiles(Inputs(bounded_(q * scale), bounded_(k.clone()), v), pairs, bounds):
        top = tile.logits.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        weights = tile.logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out[tile.rows] = weights @ tile.v / torch.where(total > 0, total, 1)
        log_normaliser[tile.rows] = (top.to(log_normaliser.dtype) + total.to(log_normaliser.dtype).log()).squeeze(-1)
    return out, log_normaliser


def backward(
    inputs: Inputs,
    pairs: Pairs,
    bounds: Bounds,
    scale: float,
    out: Tensor | None,
    log_normaliser: Tensor,
    grads: tuple[Tensor, Tensor],
) -> Inputs:
    """Gradients of q, k and v, from those of the output and of the log-normaliser.

    out: None if its part is in the gradient of the log-normaliser already.
    """
    q, k, v = inputs = Inputs(bounded_(inputs.q * scale), bounded_(inputs.k.clone()), inputs.v)
    grad_out, grad_log_normaliser = grads
    dq = torch.empty_like(q)
    dk, dv = (x.new_zeros(x.shape[0] + 1, *x.shape[1:]) for x in (k, v))  # the last block is padding
    log_normaliser = log_normaliser.masked_fill(log_normaliser == -torch.inf, torch.inf)[..., None].to(q.dtype)
    shift = grad_log_normaliser.to(q.dtype)
    shift = (shift if out is None else shift - (grad_out * out).sum(-1))[..., None]
    for tile in _tiles(inputs, pairs, bounds):
        rows, blocks = tile.rows, tile.blocks.flatten()
        weights, grad = tile.logits.sub_(log_normaliser[rows]).exp_(), grad_out[rows]
        dv.index_add_(0, blocks, (weights.mT @ grad).view(-1, *v.shape[1:]))
        dlogits = (grad @ tile.v.mT).add_(shift[rows]).mul_(weights)
        dk.index_add_(0, blocks, (dlogits.mT @ q[rows]).view(-1, *k.shape[1:]))
        dq[rows] = dlogits @ tile.k
    return Inputs(dq.mul_(scale), dk[:-1], dv[:-1])


class _Tile(NamedTuple):
    """Some tiles and the blocks they meet `[n, W]`: logits `[n, C, W * E]`, -inf for pairs that do not count."""

    rows: slice
    blocks: Tensor
    k: Tensor
    v: Tensor
    logits: Tensor


def _tiles(inputs: Inputs, pairs: Pairs, bounds: Bounds) -> Iterator[_Tile]:
    """q comes scaled."""
    q, k, v = inputs
    step = max(1, PAIRS_AT_ONCE // (q.shape[1] * pairs.blocks.shape[1] * k.shape[1]))
    alike = pairs.q_place.dim() == 1
    picture = _picture(pairs, bounds, q.dtype) if alike else q.new_empty(0)
    labels = pairs._replace(alive=_alive(pairs, k)) if alike else _with_padding(pairs)
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        blocks = _without_absent_blocks(pairs.blocks[rows], k.shape[0])
        keys, values = _gather(k, blocks), _gather(v, blocks)
        if alike:
            met = picture[:, :, : keys.shape[1]].expand(keys.shape[0], -1, -1)
            logits = torch.baddbmm(met, q[rows], keys.mT)
            _hide_absent(logits, labels.alive, blocks)
        else:
            logits = (q[rows] @ keys.mT).masked_fill_(_hidden(labels, bounds, rows, blocks), -torch.inf)
        yield _Tile(rows, blocks, keys, values, logits)


def _gather(x: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of x `[J, E, D]` side by side, `[n, W * E, D]`; padding reads an arbitrary block, masked later."""
    existing = blocks.clamp(max=x.shape[0] - 1).flatten()
    return x.index_select(0, existing).view(blocks.shape[0], -1, x.shape[2])


def _without_absent_blocks(blocks: Tensor, padding: int) -> Tensor:
    """blocks `[n, W]` without the columns at the end where no tile has a block; one column is always left."""
    used = (blocks != padding).any(0).tolist()
    width = max([w + 1 for w, some in enumerate(used) if some], default=1)
    return blocks[:, :width]


# Tiles that look alike ------------------------------------------------------------------------------------------------


def _picture(pairs: Pairs, bounds: Bounds, dtype: torch.dtype) -> Tensor:
    """`[1, C, W * E]`: 0 for pairs that count, -inf for others."""
    hidden = _outside(pairs.q_place[:, None], pairs.k_place, bounds.place_low, bounds.place_high)
    if bounds.skip_self:
        hidden |= pairs.q_place[:, None] == pairs.k_place
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[None]


def _alive(pairs: Pairs, k: Tensor) -> Tensor:
    """`[J + 1, E]`: the last block is padding, without keys."""
    alive = k.new_ones(k.shape[:2], dtype=torch.bool) if pairs.alive is None else pairs.alive
    return torch.cat([alive, alive.new_zeros(1, k.shape[1])])


def _hide_absent(logits: Tensor, alive: Tensor | None, blocks: Tensor) -> None:
    assert alive is not None
    there = alive[blocks].flatten(1, 2)
    if not bool(there.all()):
        logits.masked_fill_(~there[:, None], -torch.inf)


# Tiles with labels of their own ---------------------------------------------------------------------------------------


def _with_padding(pairs: Pairs) -> Pairs:
    """With labels for block J, which is padding."""

    def extended(labels: Tensor) -> Tensor:
        return torch.cat([labels, labels.new_full((1, *labels.shape[1:]), ABSENT_KEY)])

    k_code = None if pairs.k_code is None else extended(pairs.k_code)
    return pairs._replace(k_place=extended(pairs.k_place), k_code=k_code)


def _hidden(pairs: Pairs, bounds: Bounds, rows: slice, blocks: Tensor) -> Tensor:
    """`[n, C, W * E]`: pairs that do not count. One pass of a byte per pair and comparison: this is in the hot loop."""
    q_place, k_place = pairs.q_place[rows, :, None], pairs.k_place[blocks].flatten(1, 2)[:, None]
    hidden = _outside(q_place, k_place, bounds.place_low, bounds.place_high)
    if bounds.skip_self and bounds.place_low <= 0:
        hidden |= q_place == k_place
    if pairs.q_code is None or pairs.k_code is None:
        return hidden
    q_code, k_code = pairs.q_code[rows, :, None], pairs.k_code[blocks].flatten(1, 2)[:, None]
    for r in range(min(bounds.round + 1, q_code.shape[-1])):
        outside = _outside(q_code[..., r], k_code[..., r], bounds.code_low, bounds.code_high)
        hidden |= outside if r == bounds.round else outside.logical_not_()
    return hidden


def _outside(q: Tensor, k: Tensor, low: int, high: int) -> Tensor:
    """Whether query minus key is out of bounds; what is absent is below them."""
    if low == high:
        return q - low != k
    outside = q - low < k
    if high < UNLIMITED:
        outside |= q - high > k
    return outside


# Parts ----------------------------------------------------------------------------------------------------------------


def merge(outs: list[Tensor], log_normalisers: list[Tensor]) -> Tensor:
    """One output `[..., Dv]` from parts that saw different keys, each with its log-normaliser `[...]`."""
    if len(outs) == 1:
        return outs[0]
    log_normaliser = torch.stack(log_normalisers)
    top = log_normaliser.detach().amax(0)
    shares = (log_normaliser - top.masked_fill(top == -torch.inf, 0)).exp()
    total = shares.sum(0)
    shares = (shares / torch.where(total > 0, total, 1)).to(outs[0].dtype)
    return sum((share[..., None] * out for share, out in zip(shares, outs, strict=True)), torch.zeros_like(outs[0]))
