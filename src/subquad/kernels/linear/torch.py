"""Linear attention in plain torch: out_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s).

phi acts on each number of x, or of W x. Keys may carry a log-weight, kept at one running maximum per head (signed
features cannot have one per feature), within a block one per row. Features live for one tile only.

Letters as in `blocks.py`.
"""

from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.features.elementwise import ELEMENTWISE, at_least_tiny
from subquad.kernels import compensated, problem
from subquad.kernels.blocks import add_window, from_blocks, to_blocks, window
from subquad.kernels.centre import FarField, Piece, normalised_rows, pieces
from subquad.kernels.compensated import Total
from subquad.kernels.linear.inputs import LinearInputs, LinearOptions
from subquad.kernels.problem import (
    DEAD,
    FLOOR,
    NOWHERE,
    Gradients,
    KeyTile,
    Outputs,
    Problem,
    Saved,
    Target,
    between_borders,
)
from subquad.kernels.projection import project, unproject, weight_gradient
from subquad.kernels.scan import running_maxima, scan, scan_backward


def tile_shape(heads: int, num_features: int, chunk: int) -> tuple[int, int]:
    block = chunk or 64
    return block, max(1, problem.TILE_ELEMENTS // (heads * num_features * block)) * block


def border_count(length: int, heads: int, num_features: int, options: LinearOptions) -> int:
    """How many states the forward keeps for the backward."""
    if not options.borders:
        return 0
    tile = tile_shape(heads, num_features, options.chunk)[1]
    return problem.border_count(length, tile, num_features) if options.causal else 1


def forward(inputs: LinearInputs, options: LinearOptions) -> Outputs:
    return _Call(inputs, options).forward()


def backward(inputs: LinearInputs, options: LinearOptions, saved: Saved, want_map: bool) -> Gradients:
    """Of all inputs that have one; of the projection if asked, of `far_sum` if causal."""
    return _Call(inputs, options, want_map).backward(saved)


class _Keys(NamedTuple):
    tile: KeyTile
    projected: Tensor  # [B, K, N, C, M]
    phi: Tensor
    log_weight: Tensor | None  # [B, K, N, C]
    factor: Tensor | None  # [B, K, N, C, 1] exp(log-weight - after), 0 for dead keys; None: all 1
    weights: Tensor  # phi * factor
    before: Tensor  # [B, K, N, 1] running maxima of the log-weights, before and after each block
    after: Tensor


class _Read(NamedTuple):
    """What rows read: the states of their blocks, and what their values are relative to."""

    states: Tensor  # [B, K, N or 1, M, V]
    centre: Tensor  # [B, K, 1, V]


class _Folded(NamedTuple):
    """A tile of keys on its way into the state."""

    keys: _Keys
    read: _Read  # what each block finds
    decay: Tensor  # [B, K, N, 1]
    final: FarField


class _OwnGradients(NamedTuple):
    """What the rows of a causal block give back to its own keys."""

    phi: Tensor
    values: Tensor
    log_weight: Tensor


class _Call:
    """Forward or backward of one call. Its many short methods are steps of a tile of keys or queries."""

    def __init__(self, inputs: LinearInputs, options: LinearOptions, want_map: bool = False) -> None:
        self.inputs, self.options, self.want_map = inputs, options, want_map
        self.p = Problem(inputs.q, inputs.k, inputs.v, inputs.alive, options.root)
        self.map = ELEMENTWISE[options.feature_map]
        self.weight = None if inputs.weight is None else inputs.weight.to(self.p.dtype)
        self.num_features = inputs.num_features
        chunk = min(options.chunk, max(self.p.length, self.p.key_length))  # a longer one is padding
        self.block, self.tile = tile_shape(self.p.batch * self.p.heads, self.num_features, chunk)

    def forward(self) -> Outputs:
        p = self.p
        target = p.new_target((), self.options.borders)
        state = self._initial_state()
        count = border_count(p.length, p.batch * p.heads, self.num_features, self.options)
        borders_max, borders_sum = (s.new_empty(count, *s.shape) for s in (state.max, state.border()))
        if self.options.causal:
            for i, segment in enumerate(self._segments()):
                for piece in segment:
                    state = state.recentred() if piece.recentres else state
                    if self.options.borders and piece is segment[0]:
                        borders_max[i], borders_sum[i] = state.max, state.border()
                    state = self._forward_tile(piece, state, target)
        else:
            state = self._summary(state)
            if self.options.borders:
                borders_max[0], borders_sum[0] = state.max, state.border()
            for piece in self._whole_tiles(p.length):
                self._read(piece, _Read(state.sum[:, :, None], state.centre), None, target)
        final = (state.max, state.plain_sum())
        final = (s.clone() if self.options.causal else s.new_empty(0) for s in final)
        out = target.out.to(p.q.dtype)
        return Outputs(out, target.normaliser, target.low, borders_max, borders_sum, *final)

    def backward(self, saved: Saved) -> Gradients:
        inputs = self.inputs
        names = ("q", "k", "v") if inputs.log_weight is None else ("q", "k", "v", "log_weight")
        into = {name: self.p.zeros_like(getattr(inputs, name)) for name in names}
        if self.weight is not None:
            into["weight"] = torch.zeros_like(self.weight)
        grad_state = saved.last_state_gradient()
        if self.options.causal:
            for i, segment in reversed(list(enumerate(self._segments()))):
                states = [FarField.from_border(saved.borders_max[i], saved.borders_sum[i])]
                for piece, following in pairwise(segment):
                    state = self._open(piece, states[-1]).final
                    states.append(state.recentred() if following.recentres else state)
                for piece, state in reversed(list(zip(segment, states, strict=True))):
                    grad_state = self._backward_tile(piece, state, saved, grad_state, into)
            return into | {"far_sum": grad_state.high}
        field = FarField.from_border(saved.borders_max[0], saved.borders_sum[0])
        for piece in self._whole_tiles(self.p.length):
            reads, _ = self._read_backward(piece, _Read(field.sum[:, :, None], field.centre), None, saved, into)
            grad_state = compensated.add(grad_state, reads.sum(2))
        for piece in self._whole_tiles(self.p.key_length):
            keys = self._keys(piece, field.max, at_final_maximum=True)
            self._keys_backward(keys, grad_state.high[:, :, None], None, into)
        return into

    def _initial_state(self) -> FarField:
        if self.inputs.far_max is not None and self.inputs.far_sum is not None:
            return FarField.plain(self.inputs.far_max, self.inputs.far_sum)
        shape = (self.p.batch, self.p.key_heads, self.num_features, self.p.value_dim + 1)
        far_sum = torch.zeros(shape, dtype=self.p.dtype, device=self.p.q.device)
        lowest = 0.0 if self.inputs.log_weight is None else FLOOR
        return FarField.plain(far_sum.new_full((*shape[:2], 1), lowest), far_sum)

    def _segments(self) -> list[list[Piece]]:
        tiles = pieces(self.p.length, self.tile, self.block)
        return between_borders(tiles, self.tile, self.num_features)

    def _whole_tiles(self, length: int) -> list[Piece]:
        return [Piece(start, min(start + self.tile, length), False) for start in range(0, length, self.tile)]

    def _project(self, x: Tensor) -> Tensor:
        return x if self.weight is None else project(x, self.weight)

    def _keys(self, piece: Piece, far_max: Tensor, at_final_maximum: bool = False) -> _Keys:
        first, blocks = piece.start, piece.blocks(self.block)
        tile = self.p.keys(first, self.block, blocks)
        projected = self._project(tile.y)
        phi = self.map.phi(projected)
        before = after = far_max[:, :, None].expand(-1, -1, blocks, -1)
        factor = None if tile.alive is None else tile.alive[..., None].to(phi.dtype)
        log_weight = None
        if self.inputs.log_weight is not None:
            log_weight = window(self.inputs.log_weight, first, first + self.block * blocks).to(phi.dtype)
            log_weight = to_blocks(log_weight, self.block)
            if tile.alive is not None:
                log_weight = log_weight.masked_fill(~tile.alive, DEAD)
            if not at_final_maximum:
                before, after = running_maxima(log_weight.amax(-1, keepdim=True), far_max)
            factor = (log_weight - after).exp()[..., None]
        weights = phi if factor is None else phi * factor
        return _Keys(tile, projected, phi, log_weight, factor, weights, before, after)

    def _summary(self, state: FarField) -> FarField:
        for piece in chain.from_iterable(pieces(self.p.key_length, self.tile, self.block)):
            state = self._open(piece, state.recentred() if piece.recentres else state).final
        return state

    def _forward_tile(self, piece: Piece, state: FarField, target: Target) -> FarField:
        tile = self._open(piece, state)
        self._read(piece, tile.read, tile.keys, target)
        return tile.final

    def _open(self, piece: Piece, state: FarField) -> _Folded:
        keys = self._keys(piece, state.max)
        decay = (keys.before - keys.after).exp()
        states, last = scan(keys.weights.mT @ (keys.tile.v - state.centre[:, :, None]), decay, state.total)
        final = FarField(keys.after[:, :, -1], *last, state.centre)
        return _Folded(keys, _Read(states, state.centre), decay, final)

    def _queries(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.p.queries(piece.start, self.block, piece.blocks(self.block))
        projected = self._project(x)
        phi = self.map.phi(projected)
        # a row's own factor cancels; taken out, tiny features of queries and keys do not underflow together
        size = phi.abs().amax(-1, keepdim=True)
        return x, projected, phi, torch.where(size > 0, size, 1)

    def _read(self, piece: Piece, read: _Read, own: _Keys | None, target: Target) -> None:
        _, _, phi, size = self._queries(piece)
        weights = phi / size
        far, near = weights @ read.states, None
        if own is not None:
            of_state, of_own = self._row_factors(own)
            if of_state is not None:
                far *= of_state
            near = self._own_scores(weights, own, of_own) @ own.tile.v
        total = far[..., -1:] if near is None else far[..., -1:] + near[..., -1:]
        total = torch.where(at_least_tiny(total), total, NOWHERE)
        rows = normalised_rows(far, near, total, read.centre)
        self.p.put_rows(target, piece.start, self.block, rows, total[..., 0])

    def _read_backward(
        self, piece: Piece, read: _Read, own: _Keys | None, saved: Saved, into: Gradients
    ) -> tuple[Tensor, "_OwnGradients | None"]:
        """Adds the queries' gradients; returns those of the states, and of the own block's keys."""
        x, projected, phi, size = self._queries(piece)
        grad, centred_grad, total = self.p.output_gradient(saved, piece.start, self.block, x.shape[2], read.centre)
        grad, centred_grad = (g / total[..., None] for g in (grad, centred_grad))
        weights = phi / size
        dweights = centred_grad @ read.states.mT
        reads, own_gradients = weights.mT @ grad, None
        if own is not None:
            of_state, of_own = self._row_factors(own)
            if of_state is not None:
                dweights *= of_state
                reads = weights.mT @ (grad * of_state)
            scores = self._own_scores(weights, own, of_own)
            dscores = self.p.causal_scores(grad @ own.tile.v.mT, self.block)
            dvalues, dlog_weight = scores.mT @ grad, (scores * dscores).sum(-2)
            if of_own is not None:
                dscores *= of_own
            dweights += dscores @ own.phi
            own_gradients = _OwnGradients(dscores.mT @ weights, dvalues, dlog_weight)
        dprojected = dweights.mul_(self.map.slope(projected, phi) / size)
        self.p.add_query_gradients(into["q"], piece.start, self.block, self._unproject(x, dprojected, into))
        return reads, own_gradients

    def _row_factors(self, own: _Keys) -> tuple[Tensor | None, Tensor | None]:
        """Factors of what a row of a causal block reads: `[.., R, 1]` of the state, `[.., R, C]` of its own keys.

        A row's reference is the largest log-weight it sees, itself included. The block's would hide a small row from
        itself behind a later, larger key.
        """
        if own.log_weight is None:
            return None, None if own.factor is None else own.factor.mT
        seen = torch.maximum(own.log_weight.cummax(-1).values, own.before)
        of_state = (own.before - seen).exp()[..., None]
        of_own = (own.log_weight[..., None, :] - seen[..., None]).clamp(max=0).exp()
        repeats = (1, 1, 1, self.p.groups, 1)
        return of_state.repeat(repeats), of_own.repeat(repeats)

    def _own_scores(self, weights: Tensor, own: _Keys, factor: Tensor | None) -> Tensor:
        scores = self.p.causal_scores(weights @ own.phi.mT, self.block)
        return scores if factor is None else scores.mul_(factor)

    def _backward_tile(self, piece: Piece, state: FarField, saved: Saved, grad_state: Total, into: Gradients) -> Total:
        tile = self._open(piece, state)
        reads, own = self._read_backward(piece, tile.read, tile.keys, saved, into)
        grad_updates, grad_state = scan_backward(reads, tile.decay, grad_state)
        self._keys_backward(tile.keys, grad_updates, own, into)
        return grad_state

    def _keys_backward(self, keys: _Keys, grad_updates: Tensor, own: "_OwnGradients | None", into: Gradients) -> None:
        tile = keys.tile
        dweights, dvalues = tile.v @ grad_updates.mT, keys.weights @ grad_updates
        if self.inputs.log_weight is not None:
            dlog_weight = (dweights * keys.weights).sum(-1)
            if own is not None:
                dlog_weight += own.log_weight
            add_window(into["log_weight"], tile.first, from_blocks(dlog_weight, self.block))
        dphi = dweights if keys.factor is None else dweights.mul_(keys.factor)
        if own is not None:
            dphi += own.phi
            dvalues += own.values
        dprojected = dphi.mul_(self.map.slope(keys.projected, keys.phi))
        dy = self._unproject(tile.y, dprojected, into)
        self.p.add_key_gradients(into["k"], into["v"], tile.first, self.block, dy, dvalues)

    def _unproject(self, x: Tensor, grad: Tensor, into: Gradients) -> Tensor:
        if self.weight is None:
            return grad
        if self.want_map:
            into["weight"].add_(weight_gradient(grad, x, self.weight))
        return unproject(grad, self.weight)
