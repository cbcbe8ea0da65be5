"""Bidirectional FAVOR without near blocks: every query reads one summary of all keys."""

import torch
from torch import Tensor

from subquad.kernels.favor.problem import FavorProblem, Gradients, normalise, references
from subquad.kernels.problem import Saved


class FullField:
    def __init__(self, problem: FavorProblem) -> None:
        self.p = problem
        self.tile = problem.tile  # tokens, as one block

    def forward(self, out: Tensor, lognorm: Tensor) -> tuple[Tensor, Tensor]:
        """Fills `out` and `lognorm`; returns the summary the backward needs."""
        far_max, far_sum = self.p.empty_state()
        for first in range(0, self.p.key_length, self.tile):
            keys = self.p.keys(first, *self._shape(first, self.p.key_length))
            logs = self.p.features.of_keys(keys.y, self.p.dead_bias(keys.alive))[:, :, 0]
            grown = torch.maximum(far_max, logs.amax(-2))
            weights = logs.sub_(grown[:, :, None]).exp_()
            far_sum = torch.addcmul(weights.mT @ keys.v[:, :, 0], far_sum, (far_max - grown).exp_()[..., None])
            far_max = grown
        for start in range(0, self.p.length, self.tile):
            self._read(start, far_max, far_sum, out, lognorm)
        return far_max, far_sum

    def _shape(self, start: int, length: int) -> tuple[int, int]:
        return min(self.tile, length - start), 1

    def _sinks(self, x: Tensor, start: int, block: int) -> Tensor | None:
        if not self.p.sinks:
            return None
        return self.p.exact_logits(x, self.p.sink_y[:, :, None], self.p.sink_mask(start, block, 1))

    def _read(self, start: int, far_max: Tensor, far_sum: Tensor, out: Tensor, lognorm: Tensor) -> None:
        block, blocks = self._shape(start, self.p.length)
        x = self.p.queries(start, block, blocks)
        logs, scalar = self.p.features.of_queries(x)
        logs += far_max[:, :, None, None]
        exact = self._sinks(x, start, block)
        reference = references(logs, exact, scalar)
        numerator = logs.sub_(reference.far[..., None]).exp_() @ far_sum[:, :, None]
        if exact is not None:
            weights = exact.sub_(reference.exact[..., None]).exp_()
            numerator += weights @ self.p.sink_values[:, :, None]
        tile_out, tile_lognorm = normalise(numerator, reference)
        self.p.put_rows(out, start, block, tile_out)
        self.p.put_rows(lognorm, start, block, tile_lognorm)

    def backward(self, saved: Saved, far_max: Tensor, far_sum: Tensor, into: Gradients) -> None:
        grad_sum = torch.zeros_like(far_sum)
        for start in range(0, self.p.length, self.tile):
            grad_sum += self._read_backward(start, saved, far_max, far_sum, into)
        for first in range(0, self.p.key_length, self.tile):
            block, blocks = self._shape(first, self.p.key_length)
            keys = self.p.keys(first, block, blocks)
            logs = self.p.features.of_keys(keys.y, self.p.dead_bias(keys.alive))
            weights = (logs - far_max[:, :, None, None]).exp_()
            dv = weights @ grad_sum[:, :, None]
            dlogs = weights.mul_(keys.v @ grad_sum[:, :, None].mT)
            dy = self.p.features.keys_backward(keys.y, dlogs)
            self.p.add_key_gradients(into.k, into.v, first, block, dy, dv)

    def _read_backward(self, start: int, saved: Saved, far_max: Tensor, far_sum: Tensor, into: Gradients) -> Tensor:
        block, blocks = self._shape(start, self.p.length)
        x = self.p.queries(start, block, blocks)
        grad, normaliser = self.p.output_gradient(saved, start, block, blocks)
        logs, _ = self.p.features.of_queries(x)
        logs += far_max[:, :, None, None]
        weights = logs.sub_(normaliser[..., :1]).exp_()
        grad_sum = (weights.mT @ grad)[:, :, 0]
        dlogs = weights.mul_(grad @ far_sum[:, :, None].mT)
        dx = self.p.features.queries_backward(x, dlogs)
        exact = self._sinks(x, start, block)
        if exact is not None:
            seen = exact.sub_(normaliser[..., 1:]).exp_()
            sink_y, sink_v = self.p.sink_y[:, :, None], self.p.sink_values[:, :, None]
            more, dy, dv = self.p.exact_backward(x, sink_y, sink_v, seen, grad)
            dx += more
            self.p.add_sink_gradients(into, dy, dv)
        self.p.add_query_gradients(into.q, start, block, dx)
        return grad_sum
