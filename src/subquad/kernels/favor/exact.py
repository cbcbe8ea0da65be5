"""The exact part of FAVOR: sinks and the blocks around a query, in a tile of a sweep or alone (`far=False`).

Block b attends exactly to the blocks from b - reach to b (to b + reach when not causal). Letters as in `blocks.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.centre import Rows
from subquad.kernels.favor.problem import FavorProblem, References, normalise
from subquad.kernels.problem import FLOOR, Gradients, KeyTile, Saved, Target


class Span(NamedTuple):
    """`blocks` blocks of `block` tokens from token `start` on: their scaled queries `[B, K, N, R, D]`, and their keys
    with those of the blocks around, from `reach` blocks before the first one on."""

    start: int
    block: int
    blocks: int
    x: Tensor
    keys: KeyTile


class ExactKeys:
    """Which keys the blocks of a span attend to exactly, and what flows back to them."""

    def __init__(self, problem: FavorProblem) -> None:
        self.p = problem
        self.near, self.reach = problem.options.near > 0, problem.reach

    def keys(self, start: int, block: int, blocks: int) -> KeyTile:
        around = self.reach * (1 if self.p.options.causal else 2)
        return self.p.keys(start - self.reach * block, block, blocks + around)

    def of(self, span: Span) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys and values `[B, K, N, E, ...]` a block attends to, sinks first, and the mask `[.., N, C, E]`."""
        if not (self.near or self.p.sinks):
            return None
        block, blocks = span.block, span.blocks
        y, v, masks = [], [], []
        if self.p.sinks:
            y.append(self.p.sink_y[:, :, None].expand(-1, -1, blocks, -1, -1))
            v.append(self.p.sink_values[:, :, None].expand(-1, -1, blocks, -1, -1))
            masks.append(self.p.sink_mask(span.start, block, blocks))
        for shift in self._neighbours(span):
            y.append(span.keys.y[:, :, shift : shift + blocks])
            v.append(span.keys.v[:, :, shift : shift + blocks])
            masks.append(self._mask(span, shift))
        batch = max(mask.shape[0] for mask in masks)
        masks = [mask.expand(batch, -1, -1, block, -1) for mask in masks]
        return torch.cat(y, 3), torch.cat(v, 3), torch.cat(masks, 4)

    def _neighbours(self, span: Span) -> range:
        """Offsets into the span's keys of the blocks before, the own one (`reach`) and those after it."""
        return range(span.keys.y.shape[2] - span.blocks + 1 if self.near else 0)

    def _mask(self, span: Span, shift: int) -> Tensor:
        alive = span.keys.alive
        if alive is None:
            alive = span.x.new_ones(1, 1, span.keys.y.shape[2], span.block, dtype=torch.bool)
        mask = alive[:, :, shift : shift + span.blocks, None]
        if self.p.options.causal and shift == self.reach:
            mask = mask & mask.new_ones(span.block, span.block).tril_()
        return mask

    def backward(self, span: Span, log_normaliser: Tensor, grad: Tensor, into: Gradients) -> Tensor | None:
        """Adds the gradients of keys and values; returns that of the scaled queries."""
        exact = self.of(span)
        if exact is None:
            return None
        y, v, mask = exact
        weights = self.p.exact_logits(span.x, y, mask).sub_(log_normaliser).exp_()
        dx, dy, dv = self.p.exact_backward(span.x, y, v, weights, grad)
        sinks, block = self.p.sinks, span.block
        if sinks:
            self.p.add_sink_gradients(into, dy[..., :sinks, :], dv[..., :sinks, :])
        for shift in self._neighbours(span):
            part = slice(sinks + shift * block, sinks + (shift + 1) * block)
            first = span.keys.first + shift * block
            self.p.add_key_gradients(into["k"], into["v"], first, block, dy[..., part, :], dv[..., part, :])
        return dx


class ExactOnly:
    """No far field: one pass, in which tiles do not depend on each other, and no features are computed."""

    def __init__(self, problem: FavorProblem) -> None:
        self.p, self.exact = problem, ExactKeys(problem)
        self.block, self.tile = problem.cut_block, problem.tile

    def _spans(self) -> list[tuple[int, int]]:
        """Starts, and numbers of blocks."""
        length = self.p.length
        return [(start, -(-min(self.tile, length - start) // self.block)) for start in range(0, length, self.tile)]

    def _open(self, start: int, blocks: int) -> Span:
        x = self.p.queries(start, self.block, blocks)
        if self.exact.near:
            return Span(start, self.block, blocks, x, self.exact.keys(start, self.block, blocks))
        nothing = x.new_zeros(1, 1, 0, self.block, 1)
        return Span(start, self.block, blocks, x, KeyTile(start, nothing, nothing, None))

    def forward(self, target: Target) -> None:
        for start, blocks in self._spans():
            span = self._open(start, blocks)
            exact = self.exact.of(span)
            assert exact is not None
            y, v, mask = exact
            logits = self.p.exact_logits(span.x, y, mask)
            top = logits.amax(-1).clamp_(min=FLOOR)  # a row that sees nothing: -inf - FLOOR, not -inf - -inf
            numerator = logits.sub_(top[..., None]).exp_() @ v
            out, log_normaliser = normalise(numerator, References(top, top))
            self.p.put_rows(target, start, self.block, Rows(out, torch.zeros_like(out)), log_normaliser)

    def backward(self, saved: Saved, into: Gradients) -> None:
        centre = self.p.sink_y.new_zeros(self.p.batch, self.p.key_heads, 1, self.p.value_dim + 1)
        for start, blocks in self._spans():
            span = self._open(start, blocks)
            grad, _, log_normaliser = self.p.output_gradient(saved, start, self.block, blocks, centre)
            dx = self.exact.backward(span, log_normaliser[..., 1:], grad, into)
            assert dx is not None
            self.p.add_query_gradients(into["q"], start, self.block, dx)
