"""Linear attention in plain torch: out_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s).

phi acts on each number of x, or of W x. Keys may carry a log-weight, kept at one running maximum per head (signed
features cannot have one per feature), within a block one per row. Features live for one tile only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.features.elementwise import ELEMENTWISE, at_least_tiny
from subquad.kernels import problem
from subquad.kernels.logs import project, unproject, weight_gradient
from subquad.kernels.problem import DEAD, FLOOR, NOWHERE, KeyTile, Problem, Saved, between_borders
from subquad.kernels.scan import running_maxima, scan, scan_backward
from subquad.kernels.tiles import add_window, from_blocks, to_blocks, window


class LinearInputs(NamedTuple):
    """weight `[K or 1, M, D]` projects queries and keys first; log_weight `[B, K, S]`; alive `[B or 1, S]` bool.

    far_max `[B, K, 1]` and far_sum `[B, K, M, Dv + 1]`: the state before the first token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    log_weight: Tensor | None
    alive: Tensor | None
    far_max: Tensor | None
    far_sum: Tensor | None


class LinearOptions(NamedTuple):
    feature_map: str
    causal: bool
    root: float
    chunk: int
    borders: bool  # keep what the backward needs
    engine: str = "torch"


class LinearOutputs(NamedTuple):
    """Output `[B, H, T, Dv]`, normaliser `[B, H, T]`, states at tile borders, and the state after the last token."""

    out: Tensor
    normaliser: Tensor
    borders_max: Tensor
    borders_sum: Tensor
    far_max: Tensor
    far_sum: Tensor


class LinearGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    log_weight: Tensor
    far_sum: Tensor


def tile_shape(heads: int, num_features: int, chunk: int) -> tuple[int, int]:
    block = chunk or 64
    return block, max(1, problem.TILE_ELEMENTS // (heads * num_features * block)) * block


def border_count(length: int, heads: int, num_features: int, options: LinearOptions) -> int:
    """How many states the forward keeps for the backward."""
    if not options.borders:
        return 0
    tile = tile_shape(heads, num_features, options.chunk)[1]
    return problem.border_count(length, tile, num_features) if options.causal else 1


def forward(inputs: LinearInputs, options: LinearOptions) -> LinearOutputs:
    return _Engine(inputs, options).forward()


def backward(
    inputs: LinearInputs,
    options: LinearOptions,
    saved: Saved,
    borders_max: Tensor,
    borders_sum: Tensor,
    grad_far_sum: Tensor | None,
    want_weight: bool = True,
) -> LinearGradients:
    return _Engine(inputs, options, want_weight).backward(saved, borders_max, borders_sum, grad_far_sum)


class _Keys(NamedTuple):
    tile: KeyTile
    projected: Tensor  # [B, K, N, C, M]
    phi: Tensor
    log_weight: Tensor | None  # [B, K, N, C]
    factor: Tensor | None  # [B, K, N, C, 1] exp(log-weight - after), 0 for dead keys; None: all 1
    weights: Tensor  # phi * factor
    before: Tensor  # [B, K, N, 1] running maxima of the log-weights, before and after each block
    after: Tensor


class _OwnGradients(NamedTuple):
    """What the rows of a causal block give back to its own keys."""

    phi: Tensor
    values: Tensor
    log_weight: Tensor


class _Engine:
    def __init__(self, inputs: LinearInputs, options: LinearOptions, want_weight: bool = False) -> None:
        self.inputs, self.options, self.want_weight = inputs, options, want_weight
        self.p = Problem(inputs.q, inputs.k, inputs.v, inputs.alive, options.root)
        self.map = ELEMENTWISE[options.feature_map]
        self.weight = None if inputs.weight is None else inputs.weight.to(self.p.dtype)
        self.num_features = inputs.k.shape[-1] if self.weight is None else self.weight.shape[1]
        chunk = min(options.chunk, max(self.p.length, self.p.key_length))  # a longer one is padding
        self.block, self.tile = tile_shape(self.p.batch * self.p.heads, self.num_features, chunk)

    def forward(self) -> LinearOutputs:
        p = self.p
        out = p.q.new_empty(*p.q.shape[:3], p.value_dim, dtype=p.dtype)
        normaliser = out.new_empty(out.shape[:3])
        state = self._initial_state()
        count = border_count(p.length, p.batch * p.heads, self.num_features, self.options)
        borders_max, borders_sum = (s.new_empty(count, *s.shape) for s in state)
        if self.options.causal:
            for i, starts in enumerate(self._segments()):
                if self.options.borders:
                    borders_max[i], borders_sum[i] = state
                for start in starts:
                    state = self._forward_tile(start, state, out, normaliser)
        else:
            state = self._summary(state)
            if self.options.borders:
                borders_max[0], borders_sum[0] = state
            for start in range(0, p.length, self.tile):
                self._read(start, state[1][:, :, None], None, out, normaliser)
        final = (s.clone() if self.options.causal else s.new_empty(0) for s in state)
        return LinearOutputs(out.to(p.q.dtype), normaliser, borders_max, borders_sum, *final)

    def backward(
        self, saved: Saved, borders_max: Tensor, borders_sum: Tensor, grad_final: Tensor | None
    ) -> LinearGradients:
        inputs = self.inputs
        into = LinearGradients(
            *(self.p.zeros_like(t) for t in (inputs.q, inputs.k, inputs.v)),
            weight=borders_sum.new_zeros(0) if self.weight is None else torch.zeros_like(self.weight),
            log_weight=borders_sum.new_zeros(0) if inputs.log_weight is None else self.p.zeros_like(inputs.log_weight),
            far_sum=borders_sum.new_zeros(0),
        )
        grad_state = torch.zeros_like(borders_sum[0]) if grad_final is None else grad_final
        if self.options.causal:
            for i, starts in reversed(list(enumerate(self._segments()))):
                states = [(borders_max[i], borders_sum[i])]
                for start in starts[:-1]:
                    states.append(self._open(start, states[-1])[-1])
                for start, state in reversed(list(zip(starts, states, strict=True))):
                    grad_state = self._backward_tile(start, state, saved, grad_state, into)
            return into._replace(far_sum=grad_state)
        for start in range(0, self.p.length, self.tile):
            reads, _ = self._read_backward(start, borders_sum[0][:, :, None], None, saved, into)
            grad_state = grad_state + reads.sum(2)
        for first in range(0, self.p.key_length, self.tile):
            keys = self._keys(first, self._blocks(first, self.p.key_length), borders_max[0], at_final_maximum=True)
            self._keys_backward(keys, grad_state[:, :, None], None, into)
        return into

    def _initial_state(self) -> tuple[Tensor, Tensor]:
        if self.inputs.far_max is not None and self.inputs.far_sum is not None:
            return self.inputs.far_max, self.inputs.far_sum
        shape = (self.p.batch, self.p.key_heads, self.num_features, self.p.value_dim + 1)
        far_sum = torch.zeros(shape, dtype=self.p.dtype, device=self.p.q.device)
        lowest = 0.0 if self.inputs.log_weight is None else FLOOR
        return far_sum.new_full((*shape[:2], 1), lowest), far_sum

    def _segments(self) -> list[list[int]]:
        return between_borders(list(range(0, self.p.length, self.tile)), self.tile, self.num_features)

    def _blocks(self, start: int, length: int) -> int:
        return -(-min(self.tile, length - start) // self.block)

    def _project(self, x: Tensor) -> Tensor:
        return x if self.weight is None else project(x, self.weight)

    def _keys(self, first: int, blocks: int, far_max: Tensor, at_final_maximum: bool = False) -> _Keys:
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

    def _summary(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        for first in range(0, self.p.key_length, self.tile):
            keys = self._keys(first, self._blocks(first, self.p.key_length), state[0])
            _, last = scan(keys.weights.mT @ keys.tile.v, (keys.before - keys.after).exp(), state[1])
            state = keys.after[:, :, -1], last
        return state

    def _forward_tile(
        self, start: int, state: tuple[Tensor, Tensor], out: Tensor, normaliser: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, states, _, final = self._open(start, state)
        self._read(start, states, keys, out, normaliser)
        return final

    def _open(self, start: int, state: tuple[Tensor, Tensor]) -> tuple[_Keys, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Keys of a causal tile, the states its blocks read, the decays, the last state."""
        keys = self._keys(start, self._blocks(start, self.p.length), state[0])
        decay = (keys.before - keys.after).exp()
        states, last = scan(keys.weights.mT @ keys.tile.v, decay, state[1])
        return keys, states, decay, (keys.after[:, :, -1], last)

    def _queries(self, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.p.queries(start, self.block, self._blocks(start, self.p.length))
        projected = self._project(x)
        phi = self.map.phi(projected)
        # a row's own factor cancels; taken out, tiny features of queries and keys do not underflow together
        size = phi.abs().amax(-1, keepdim=True)
        return x, projected, phi, torch.where(size > 0, size, 1)

    def _read(self, start: int, states: Tensor, own: _Keys | None, out: Tensor, normaliser: Tensor) -> None:
        _, _, phi, size = self._queries(start)
        weights = phi / size
        numerator = weights @ states
        if own is not None:
            of_state, of_own = self._row_factors(own)
            if of_state is not None:
                numerator *= of_state
            numerator += self._own_scores(weights, own, of_own) @ own.tile.v
        total = torch.where(at_least_tiny(numerator[..., -1]), numerator[..., -1], NOWHERE)
        self.p.put_rows(out, start, self.block, numerator[..., :-1] / total[..., None])
        self.p.put_rows(normaliser, start, self.block, total)

    def _read_backward(
        self, start: int, states: Tensor, own: _Keys | None, saved: Saved, into: LinearGradients
    ) -> tuple[Tensor, "_OwnGradients | None"]:
        """Adds the queries' gradients; returns those of the states, and of the own block's keys."""
        x, projected, phi, size = self._queries(start)
        grad, total = self.p.output_gradient(saved, start, self.block, x.shape[2])
        grad = grad / total[..., None]
        weights = phi / size
        dweights = grad @ states.mT
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
        self.p.add_query_gradients(into.q, start, self.block, self._unproject(x, dprojected, into))
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

    def _backward_tile(
        self, start: int, state: tuple[Tensor, Tensor], saved: Saved, grad_state: Tensor, into: LinearGradients
    ) -> Tensor:
        keys, states, decay, _ = self._open(start, state)
        reads, own = self._read_backward(start, states, keys, saved, into)
        grad_updates, grad_state = scan_backward(reads, decay, grad_state)
        self._keys_backward(keys, grad_updates, own, into)
        return grad_state

    def _keys_backward(
        self, keys: _Keys, grad_updates: Tensor, own: "_OwnGradients | None", into: LinearGradients
    ) -> None:
        tile = keys.tile
        dweights, dvalues = tile.v @ grad_updates.mT, keys.weights @ grad_updates
        if self.inputs.log_weight is not None:
            dlog_weight = (dweights * keys.weights).sum(-1)
            if own is not None:
                dlog_weight += own.log_weight
            add_window(into.log_weight, tile.first, from_blocks(dlog_weight, self.block))
        dphi = dweights if keys.factor is None else dweights.mul_(keys.factor)
        if own is not None:
            dphi += own.phi
            dvalues += own.values
        dprojected = dphi.mul_(self.map.slope(keys.projected, keys.phi))
        dy = self._unproject(tile.y, dprojected, into)
        self.p.add_key_gradients(into.k, into.v, tile.first, self.block, dy, dvalues)

    def _unproject(self, x: Tensor, grad: Tensor, into: LinearGradients) -> Tensor:
        if self.weight is None:
            return grad
        if self.want_weight:
            into.weight.add_(weight_gradient(grad, x, self.weight))
        return unproject(grad, self.weight)
