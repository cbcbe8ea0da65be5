"""Exact attention to some of the keys, in blocks: the engine of windows, hashing, clusters and strides.

Which pairs meet is data. Queries come in N tiles of C rows, keys in J blocks of E places; a tile meets W blocks, and
within them a pair counts if its labels say so. Results come with the logarithm of their normaliser, so that `merge`
can put parts together that saw different keys. Logits of a few tiles are alive at a time, forward and backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PAIRS_AT_ONCE = 1 << 19
UNLIMITED = 1 << 28  # longer than any sequence
ABSENT_QUERY, ABSENT_KEY = -(1 << 29), 1 << 29  # labels of what is not there: their difference is in no range


class Pairs(NamedTuple):
    """Tiles, blocks and labels.

    blocks: int64 `[N, W]`, the key blocks that a tile meets; J stands for none.
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


class Rule(NamedTuple):
    """A pair counts if query minus key lies between the bounds, both included: of places, and of codes in `round`.

    A pair that meets in several rounds weighs one part in each of them, so that together they count it once.
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


def forward(inputs: Inputs, pairs: Pairs, rule: Rule, scale: float) -> tuple[Tensor, Tensor]:
    """Output `[N, C, Dv]` and log-normaliser `[N, C]`; zeros and -inf for a row that sees no key."""
    q, k, v = inputs
    inputs = Inputs(q * scale, k, v)
    out, log_sum = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
    for tile in _tiles(inputs, pairs, rule):
        top = tile.logits.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0)
        weights = tile.logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out[tile.rows] = weights @ tile.v / torch.where(total > 0, total, 1)
        log_sum[tile.rows] = (top + total.log()).squeeze(-1)
    return out, log_sum


def backward(
    inputs: Inputs, pairs: Pairs, rule: Rule, scale: float, out: Tensor, log_sum: Tensor, grads: tuple[Tensor, Tensor]
) -> Inputs:
    """Gradients of q, k and v, from those of the output and of the log-normaliser."""
    q, k, v = inputs = Inputs(inputs.q * scale, inputs.k, inputs.v)
    grad_out, grad_log_sum = grads
    of_q = torch.empty_like(q)
    of_k, of_v = (x.new_zeros(x.shape[0] + 1, *x.shape[1:]) for x in (k, v))  # the last block is nobody's
    log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)[..., None]
    shift = (grad_log_sum - (grad_out * out).sum(-1))[..., None]
    for tile in _tiles(inputs, pairs, rule):
        rows, blocks = tile.rows, pairs.blocks[tile.rows].flatten()
        weights, grad = tile.logits.sub_(log_sum[rows]).exp_(), grad_out[rows]
        of_v.index_add_(0, blocks, (weights.mT @ grad).view(-1, *v.shape[1:]))
        of_logits = (grad @ tile.v.mT).add_(shift[rows]).mul_(weights)
        of_k.index_add_(0, blocks, (of_logits.mT @ q[rows]).view(-1, *k.shape[1:]))
        of_q[rows] = of_logits @ tile.k
    return Inputs(of_q.mul_(scale), of_k[:-1], of_v[:-1])


class _Tile(NamedTuple):
    """Some tiles and the keys they meet: logits `[n, C, W * E]`, -inf for pairs that do not count."""

    rows: slice
    k: Tensor
    v: Tensor
    logits: Tensor


def _tiles(inputs: Inputs, pairs: Pairs, rule: Rule) -> Iterator[_Tile]:
    q, k, v = inputs
    step = max(1, PAIRS_AT_ONCE // (q.shape[1] * pairs.blocks.shape[1] * k.shape[1]))
    alike = pairs.q_place.dim() == 1
    labels = pairs if alike else _with_nobody(pairs)
    bias = _places_alike(pairs, rule, q.dtype) if alike else q.new_empty(0)
    alive = _alive(pairs, k) if alike else None
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        blocks = pairs.blocks[rows]
        somebody = blocks.clamp(max=k.shape[0] - 1)
        keys, values = k[somebody].flatten(1, 2), v[somebody].flatten(1, 2)
        bias = bias if alike else _log_weights(labels, rule, rows, q.dtype)
        logits = torch.baddbmm(bias.expand(keys.shape[0], -1, -1), q[rows], keys.mT)
        if alive is not None and not bool((there := alive[blocks].flatten(1, 2)).all()):
            logits.masked_fill_(~there[:, None], -torch.inf)
        yield _Tile(rows, keys, values, logits)


def _alive(pairs: Pairs, k: Tensor) -> Tensor:
    """`[J + 1, E]`: nobody is in the last block."""
    alive = pairs.alive if pairs.alive is not None else k.new_ones(k.shape[:2], dtype=torch.bool)
    return torch.cat([alive, alive.new_zeros(1, k.shape[1])])


def _with_nobody(pairs: Pairs) -> Pairs:
    """With labels for the block that stands for none."""

    def extended(labels: Tensor) -> Tensor:
        return torch.cat([labels, labels.new_full((1, *labels.shape[1:]), ABSENT_KEY)])

    k_code = None if pairs.k_code is None else extended(pairs.k_code)
    return pairs._replace(k_place=extended(pairs.k_place), k_code=k_code)


def _places_alike(pairs: Pairs, rule: Rule, dtype: torch.dtype) -> Tensor:
    apart = pairs.q_place[:, None] - pairs.k_place
    counts = (apart >= rule.place_low) & (apart <= rule.place_high)
    return torch.where(counts, 0.0, -torch.inf).to(dtype)


def _log_weights(pairs: Pairs, rule: Rule, rows: slice, dtype: torch.dtype) -> Tensor:
    """`[n, C, W * E]`: 0, or minus the logarithm of the rounds in which a pair meets; -inf where it does not count."""
    blocks = pairs.blocks[rows]
    apart = pairs.q_place[rows, :, None] - pairs.k_place[blocks].flatten(1, 2)[:, None]
    counts = (apart >= rule.place_low) & (apart <= rule.place_high)
    if rule.skip_self:
        counts &= apart != 0
    if pairs.q_code is None or pairs.k_code is None:
        return torch.where(counts, 0.0, -torch.inf).to(dtype)
    q_code, k_code = pairs.q_code[rows], pairs.k_code[blocks].flatten(1, 2)
    meetings = torch.zeros_like(apart, dtype=torch.int8)
    for r in range(q_code.shape[2]):
        apart = q_code[:, :, None, r] - k_code[:, None, :, r]
        meets = (apart >= rule.code_low) & (apart <= rule.code_high)
        meetings += meets
        if r == rule.round:
            counts &= meets
    if q_code.shape[2] == 1:
        return torch.where(counts, 0.0, -torch.inf).to(dtype)
    return (-meetings.to(dtype).log_()).masked_fill_(~counts, -torch.inf)


def merge(outs: list[Tensor], log_sums: list[Tensor]) -> Tensor:
    """One output `[..., Dv]` from parts that saw different keys, each with its log-normaliser `[...]`."""
    if len(outs) == 1:
        return outs[0]
    log_sum = torch.stack(log_sums)
    top = log_sum.detach().amax(0)
    shares = (log_sum - top.masked_fill(top == -torch.inf, 0)).exp()
    total = shares.sum(0)
    shares = shares / torch.where(total > 0, total, 1)
    return sum((share[..., None] * out for share, out in zip(shares, outs, strict=True)), torch.zeros_like(outs[0]))
