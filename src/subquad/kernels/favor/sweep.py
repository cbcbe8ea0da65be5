"""FAVOR block by block along the sequence, with the far field as a running state.

near > 0: block b reads the state of blocks up to b - reach - 1 and attends exactly to those from b - reach to b (to
b + reach when not causal); what lies after b + reach is read by a second sweep in reverse. A state holds whole blocks
only, all of them visible, so its normaliser is at least 1 at the running maxima and nothing can underflow unseen.

near = 0, causal: block b reads the state of blocks up to b - 1 and its own keys by features. The maxima then include
keys that a row may not see; where those tower over what it does see, the row's sum is too small to trust (the
certificate), and the tile is done again with smaller blocks. Blocks of one token are always certified.

Letters as in `blocks.py`.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.blocks import to_blocks, window
from subquad.kernels.centre import FarField, Piece, Rows, merged_rows, pieces
from subquad.kernels.compensated import Total
from subquad.kernels.favor.exact import ExactKeys, Span
from subquad.kernels.favor.problem import FavorProblem, normalise_centred, references
from subquad.kernels.problem import FLOOR, Gradients, KeyTile, Saved, Target, between_borders
from subquad.kernels.scan import running_maxima, scan, scan_backward

# A row's sum below this is recomputed: its terms are exp() of arguments so large that float32 rounds them visibly.
CERTIFICATE = 1e-8
SPLIT = 4  # a tile that is not certified is cut into this many, with blocks smaller by as much


class Folded(NamedTuple):
    """The keys that a tile touches, and the states on the way through it."""

    keys: KeyTile  # all keys the tile's blocks touch; the first N blocks of them enter the state
    weights: Tensor  # [B, K, N, C, M] features of those
    reference: Tensor  # [B, K, N, M] maxima at which each block reads
    states: Tensor  # [B, K, N, M, V] what each block reads
    decay: Tensor  # [B, K, N, M]
    final: FarField  # the state after this tile, with the centre of all of them


class Tile(NamedTuple):
    """`blocks` blocks of `block` tokens from token `start` on, and what their rows read."""

    start: int
    block: int
    blocks: int
    x: Tensor  # [B, K, N, R, D] scaled queries
    logs: Tensor  # [B, K, N, R, M] log-features of the queries, at the reference of the state
    scalar: Tensor  # [B, K, N, R] common log-factor of a row's features
    folded: Folded

    @property
    def keys(self) -> KeyTile:
        return self.folded.keys

    @property
    def span(self) -> Span:
        return Span(self.start, self.block, self.blocks, self.x, self.keys)


class Sweep:
    """One run along the blocks. Each step of a tile is a method, forward and backward; all share the problem."""

    def __init__(self, problem: FavorProblem, *, reverse: bool = False) -> None:
        self.p, self.reverse = problem, reverse
        self.near = problem.options.near
        self.own_by_features = self.near == 0
        self.block, self.tile = problem.cut_block, problem.tile  # tokens
        self.exact = ExactKeys(problem)

    def segments(self) -> list[list[Piece]]:
        """Pieces of the tiles, in order, by the border state they come after."""
        tiles = pieces(self.p.length, self.tile, self.block, self.reverse)
        return between_borders(tiles, self.tile, self.p.num_features)

    # Forward ----------------------------------------------------------------------------------------------------------

    def forward(self, target: Target, borders_max: Tensor, borders_sum: Tensor) -> FarField:
        """Fills the target (adds to it in a reverse sweep), and the states at segment borders."""
        state = self.p.initial_state()
        for i, segment in enumerate(self.segments()):
            for piece in segment:
                state = state.recentred() if piece.recentres else state
                if self.p.options.borders and piece is segment[0]:
                    borders_max[i], borders_sum[i] = state.max, state.border()
                state = self._forward_tile(piece.start, self.block, piece.blocks(self.block), state, target)
        return state

    def _forward_tile(self, start: int, block: int, blocks: int, state: FarField, target: Target) -> FarField:
        tile = self._open(start, block, blocks, state)
        rows, log_normaliser, certified = self._read(tile)
        if not certified:
            for part in self._parts(tile):
                state = self._forward_tile(part, block // SPLIT or 1, blocks, state, target)
            return state
        if self.reverse:
            rows, log_normaliser = self._merge(tile, rows, log_normaliser, target)
        self.p.put_rows(target, start, block, rows, log_normaliser)
        return tile.folded.final

    def _open(self, start: int, block: int, blocks: int, state: FarField) -> Tile:
        folded = self._fold(start, block, blocks, state)
        x = self.p.queries(start, block, blocks)
        logs, scalar = self.p.features.of_queries(x)
        logs += folded.reference[:, :, :, None]
        return Tile(start, block, blocks, x, logs, scalar, folded)

    def _fold(self, start: int, block: int, blocks: int, state: FarField) -> Folded:
        keys = self._keys(start, block, blocks)
        fold = self.p.inputs.alive if self.p.inputs.fold is None else self.p.inputs.fold
        dead_bias = self.p.dead_bias(self.p.mask(fold, keys.first, block, blocks))
        key_logs = self.p.features.of_keys(keys.y[:, :, :blocks], dead_bias)
        before, after = running_maxima(key_logs.amax(-2), state.max, self.reverse)
        decay = (before - after).exp_()
        weights = key_logs.sub_(after[:, :, :, None]).exp_()
        values = keys.v[:, :, :blocks] - state.centre[:, :, None]
        states, last = scan(weights.mT @ values, decay, state.total, self.reverse)
        final = FarField(after[:, :, 0 if self.reverse else -1], *last, state.centre)
        if self.own_by_features:  # the own block is relative to the later maxima, so the state must be too
            return Folded(keys, weights, after, states.mul_(decay[..., None]), decay, final)
        return Folded(keys, weights, before, states, decay, final)

    def _keys(self, start: int, block: int, blocks: int) -> KeyTile:
        if self.own_by_features:
            return self.p.keys(start, block, blocks)
        if self.reverse:
            return self.p.keys(start + self.p.reach * block, block, blocks)
        return self.exact.keys(start, block, blocks)

    def _read(self, tile: Tile) -> tuple[Rows, Tensor, bool]:
        exact, logits, near = None if self.reverse else self.exact.of(tile.span), None, None
        if exact is not None:
            logits = self.p.exact_logits(tile.x, exact[0], exact[2])
        reference = references(tile.logs, logits, tile.scalar)
        weights = tile.logs.sub_(reference.far[..., None]).exp_()
        far = weights @ tile.folded.states
        if self.own_by_features:
            near = self._own_scores(tile, weights) @ tile.keys.v
        if exact is not None and logits is not None:
            of_exact = logits.sub_(reference.exact[..., None]).exp_() @ exact[1]
            near = of_exact if near is None else near + of_exact
        rows, log_normaliser = normalise_centred(far, near, tile.folded.final.centre, reference)
        row_sums = far[..., -1] if near is None else far[..., -1] + near[..., -1]
        return rows, log_normaliser, self._certified(tile, row_sums)

    def _own_scores(self, tile: Tile, weights: Tensor) -> Tensor:
        """Causal scores of a block's rows and its own keys, `[B, K, N, R, C]`."""
        return self.p.causal_scores(weights @ tile.folded.weights.mT, tile.block)

    def _certified(self, tile: Tile, row_sums: Tensor) -> bool:
        if not self.own_by_features or tile.block == 1:
            return True
        doubtful = row_sums < CERTIFICATE
        # a row that truly sees nothing has the sum 0, and that is right
        return not bool(doubtful.any()) or not bool((doubtful & self._rows_that_see(tile)).any())

    def _rows_that_see(self, tile: Tile) -> Tensor:
        """`[B, 1, N, R]`: rows with at least one visible key."""
        inputs, p = self.p.inputs, self.p
        alive = inputs.q.new_ones(1, p.key_length, dtype=torch.bool) if inputs.alive is None else inputs.alive
        sees = alive.cumsum(-1) > 0
        if inputs.sink_seen is not None:
            sees = sees | (inputs.sink_seen > 0)
        if inputs.far_max is not None:
            sees = sees | (inputs.far_max.amax((1, 2)) > FLOOR / 2)[:, None]
        stop = tile.start + tile.block * tile.blocks
        sees = window(sees[:, None].expand(p.batch, p.groups, -1), tile.start, stop)
        return to_blocks(sees, tile.block, p.groups)

    def _parts(self, tile: Tile) -> range:
        """Starts of the smaller tiles that an uncertified one is cut into."""
        stop = min(tile.start + tile.block * tile.blocks, self.p.length)
        return range(tile.start, stop, tile.blocks * (tile.block // SPLIT or 1))

    def _merge(self, tile: Tile, rows: Rows, log_normaliser: Tensor, target: Target) -> tuple[Rows, Tensor]:
        """This sweep's part of the rows and what the other sweep left there, under one normaliser."""

        def left(x: Tensor) -> Tensor:
            stop = tile.start + tile.block * tile.blocks
            return to_blocks(window(x, tile.start, stop), tile.block, self.p.groups)

        other_out, other_log_normaliser = left(target.out), left(target.normaliser)
        other = Rows(other_out, torch.zeros_like(other_out))
        if target.low.numel():
            other = Rows.unpacked(other_out, left(target.low))
        here, there = log_normaliser[..., :1], other_log_normaliser[..., :1]
        both = torch.logaddexp(here, there)
        anchor = both.clamp(min=FLOOR)  # both parts empty: -inf - FLOOR, not -inf - -inf
        share, other_share = ((part - anchor).exp_() for part in (here, there))
        grown = anchor - there.clamp(min=FLOOR)  # the exact part was in the other sweep only
        merged = merged_rows(rows, other, share, other_share)
        return merged, torch.cat([both, other_log_normaliser[..., 1:] + grown], -1)

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward(self, saved: Saved, first_border: int, into: Gradients) -> Tensor:
        """Adds all gradients; returns that of the initial state. first_border: of this sweep among the saved ones."""
        grad_state = saved.last_state_gradient()
        for i, segment in reversed(list(enumerate(self.segments(), first_border))):
            states = [FarField.from_border(saved.borders_max[i], saved.borders_sum[i])]
            for piece, following in pairwise(segment):
                state = self._fold(piece.start, self.block, piece.blocks(self.block), states[-1]).final
                states.append(state.recentred() if following.recentres else state)
            for piece, state in reversed(list(zip(segment, states, strict=True))):
                blocks = piece.blocks(self.block)
                grad_state = self._backward_tile(piece.start, self.block, blocks, state, saved, grad_state, into)
        return grad_state.high

    def _backward_tile(
        self,
        start: int,
        block: int,
        blocks: int,
        state: FarField,
        saved: Saved,
        grad_state: Total,
        into: Gradients,
    ) -> Total:
        """Gradients by the far field and the exact part, added to `into`; returns that of the state before."""
        tile = self._open(start, block, blocks, state)
        grad, centred_grad, log_normaliser = self.p.output_gradient(saved, start, block, blocks, state.centre)
        if self._too_large(tile, log_normaliser):
            return self._backward_parts(tile, state, saved, grad_state, into)
        weights = tile.logs.sub_(log_normaliser[..., :1]).exp_()
        own = self._own_backward(tile, weights, grad) if self.own_by_features else None
        reads = weights.mT @ grad
        if self.own_by_features:
            reads.mul_(tile.folded.decay[..., None])
        grad_updates, grad_state = scan_backward(reads, tile.folded.decay, grad_state, self.reverse)
        dlogs = centred_grad @ tile.folded.states.mT
        key_dlogs = tile.keys.v[:, :, :blocks] @ grad_updates.mT
        dv = tile.folded.weights @ grad_updates
        if own is not None:
            dlogs += own[0]
            key_dlogs += own[1]
            dv += own[2]
        dx = self.p.features.queries_backward(tile.x, dlogs.mul_(weights))
        dy = self.p.features.keys_backward(tile.keys.y[:, :, :blocks], key_dlogs.mul_(tile.folded.weights))
        self.p.add_key_gradients(into["k"], into["v"], tile.keys.first, block, dy, dv)
        of_exact = None if self.reverse else self.exact.backward(tile.span, log_normaliser[..., 1:], grad, into)
        self.p.add_query_gradients(into["q"], start, block, dx if of_exact is None else dx + of_exact)
        return grad_state

    def _too_large(self, tile: Tile, log_normaliser: Tensor) -> bool:
        """The certificate again, from the normaliser that the forward found."""
        if not self.own_by_features or tile.block == 1:
            return False
        return bool((tile.logs.amax(-1) - log_normaliser[..., 0] > -math.log(CERTIFICATE)).any())

    def _backward_parts(self, tile: Tile, state: FarField, saved: Saved, grad_state: Total, into: Gradients) -> Total:
        block, parts = tile.block // SPLIT or 1, list(self._parts(tile))
        states = [state]
        for part in parts[:-1]:
            states.append(self._fold(part, block, tile.blocks, states[-1]).final)
        for part, state in reversed(list(zip(parts, states, strict=True))):
            grad_state = self._backward_tile(part, block, tile.blocks, state, saved, grad_state, into)
        return grad_state

    def _own_backward(self, tile: Tile, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the own block adds, before the factors `weights`: to query logs, key logs and values."""
        scores = self._own_scores(tile, weights)
        dscores = self.p.causal_scores(grad @ tile.keys.v.mT, tile.block)
        return dscores @ tile.folded.weights, dscores.mT @ weights, scores.mT @ grad
