"""Exact attention within blocks of equal code, in several rounds, each token always with itself.

A code names a block of a bucket; codes of neighbouring blocks differ by one, those of other buckets by two or more.
Round after round, queries of one code are laid out in tiles and meet the blocks of their own code, of the one before
and, unless causal, of the one after. All parts share one normaliser, so the backward needs only its logarithm.

Letters as in `torch.py`, and B batch, H query heads, K key heads, T tokens; rows are all tokens of all heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import engines
from subquad.kernels.sparse import torch as sparse
from subquad.kernels.sparse.groups import Groups, group, meetings
from subquad.kernels.sparse.torch import ABSENT_KEY, ABSENT_QUERY, UNLIMITED, Bounds, Inputs, Pairs


class Options(NamedTuple):
    """tile: queries, and keys, that are done together; speed only."""

    causal: bool
    scale: float
    tile: int


class _Round(NamedTuple):
    tiles: Groups
    blocks: Groups
    pairs: Pairs
    bounds: Bounds

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        return Inputs(self.tiles.gather(q), self.blocks.gather(k), self.blocks.gather(v))


class Problem:
    """q `[B, H, T, D]`, k `[B, K, T, D]`, v `[B, K, T, Dv]` as rows of tokens; masked tokens hold finite numbers.

    q_code int32 `[R, B, H, T]`, k_code `[R, B, K, T]`: the code of a token in each round, below 0 for a masked one.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, q_code: Tensor, k_code: Tensor, options: Options) -> None:
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.shape = q.shape
        self.options = options._replace(tile=min(options.tile, q.shape[2]))  # no more tokens share a code
        self.groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = (x.to(self.dtype).reshape(-1, x.shape[3]) for x in (q, k, v))
        self.real = q_code[0].flatten() >= 0
        self.q_labels, self.k_labels = (code.flatten(1).T.contiguous() for code in (q_code, k_code))  # [rows, R]
        apart = int(max(q_code.max(), k_code.max())) + 3  # codes of different sequences and heads
        self.q_code = self._distinct(q_code, apart, self.groups)
        self.k_code = self._distinct(k_code, apart, 1)
        self.rounds = len(q_code) if bool(self.real.any()) else 0

    @staticmethod
    def _distinct(code: Tensor, apart: int, groups: int) -> Tensor:
        """`[R, rows]`: codes that no two sequences or key heads share."""
        batch, heads = code.shape[1:3]
        owner = torch.arange(batch * heads, device=code.device).view(batch, heads, 1) // groups
        return torch.where(code >= 0, code + owner * apart, -1).flatten(1)

    def round(self, r: int) -> _Round:
        options = self.options
        blocks = group(self.k_code[r], options.tile)
        tiles, met = meetings(group(self.q_code[r], options.tile), blocks, 1, 0 if options.causal else 1)
        place = torch.arange(self.shape[2], dtype=torch.int32, device=self.q.device)
        pairs = Pairs(
            met,
            tiles.labels(place.repeat(len(self.q) // len(place)), ABSENT_QUERY),
            blocks.labels(place.repeat(len(self.k) // len(place)), ABSENT_KEY),
            tiles.labels(self.q_labels[:, :r], ABSENT_QUERY) if r else None,
            blocks.labels(self.k_labels[:, :r], ABSENT_KEY) if r else None,
        )
        low, code_low = (1, 0) if options.causal else (-UNLIMITED, -1)  # the own token is a part of its own
        return _Round(tiles, blocks, pairs, Bounds(low, code_low=code_low, code_high=1, round=r, skip_self=True))

    def by_group(self, x: Tensor) -> Tensor:
        """Rows of query heads, `[B, K, heads of a group, T, ...]`."""
        return x.view(self.shape[0], -1, self.groups, self.shape[2], *x.shape[1:])

    def by_key_head(self, x: Tensor) -> Tensor:
        """Rows of key heads, to broadcast against `by_group`."""
        return x.view(self.shape[0], -1, 1, self.shape[2], *x.shape[1:])

    def own_logits(self) -> Tensor:
        """Of each query with its own token, `[rows]`; -inf for masked ones."""
        products = self.by_group(self.q) * self.by_key_head(self.k)
        logits = products.sum(-1, dtype=sparse.log_dtype(self.q)).flatten() * self.options.scale
        return logits.masked_fill_(~self.real, -torch.inf)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output `[rows, Dv]` and log-normaliser `[rows]`; zeros and -inf for masked queries."""
    p = problem
    log_normaliser = p.own_logits()
    out = p.by_key_head(p.v).expand(-1, -1, p.groups, -1, -1).reshape(len(p.q), -1)
    out = out.masked_fill(~p.real[:, None], 0)
    engine = engines.choose_sparse(p.q)
    for r in range(p.rounds):
        this = p.round(r)
        part, part_log = engine.forward(this.inputs(p.q, p.k, p.v), this.pairs, this.bounds, p.options.scale)
        part, part_log = this.tiles.scatter(part), this.tiles.scatter(part_log, -torch.inf)
        both = torch.logaddexp(log_normaliser, part_log)
        share = (part_log - both.masked_fill(both == -torch.inf, 0)).exp_().to(out.dtype)
        out, log_normaliser = out.lerp_(part, share[:, None]), both
    return out, log_normaliser


def backward(problem: Problem, out: Tensor, log_normaliser: Tensor, grad: Tensor) -> Inputs:
    """Gradients of q, k and v as rows, from the output, its log-normaliser and its gradient."""
    p, scale = problem, problem.options.scale
    shift = -(grad * out).sum(-1)
    weight = (p.own_logits() - log_normaliser.masked_fill(~p.real, 0)).exp_().to(p.dtype)[:, None]
    v = p.by_key_head(p.v).expand(-1, -1, p.groups, -1, -1).reshape(len(p.q), -1)
    dlogit = p.by_group(weight * ((grad * v).sum(-1) + shift)[:, None] * scale)
    dq = (dlogit * p.by_key_head(p.k)).reshape(p.q.shape)
    dk = (dlogit * p.by_group(p.q)).sum(2).reshape(p.k.shape)
    dv = p.by_group(weight * grad).sum(2).reshape(p.v.shape)
    engine = engines.choose_sparse(p.q)
    for r in range(p.rounds):
        this = p.round(r)
        tiles, blocks = this.tiles, this.blocks
        grads = tiles.gather(grad), tiles.gather(shift)
        inputs = this.inputs(p.q, p.k, p.v)
        part = engine.backward(inputs, this.pairs, this.bounds, scale, None, tiles.gather(log_normaliser), grads)
        dq += tiles.scatter(part.q)
        dk += blocks.scatter(part.k)
        dv += blocks.scatter(part.v)
    return Inputs(dq, dk, dv)
