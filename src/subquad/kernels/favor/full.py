"""Bidirectional FAVOR without near blocks: every query reads one summary of all keys.

Letters as in `blocks.py`.
"""

from itertools import chain

import torch
from torch import Tensor

from subquad.kernels import compensated
from subquad.kernels.centre import FarField, Piece, pieces
from subquad.kernels.compensated import Total, product_over_tokens
from subquad.kernels.favor.problem import FavorProblem, normalise_centred, references
from subquad.kernels.problem import Gradients, Saved, Target


class FullField:
    def __init__(self, problem: FavorProblem) -> None:
        self.p = problem
        self.tile = problem.tile  # tokens, as one block

    def forward(self, target: Target) -> FarField:
        """Fills the target; returns the summary the backward needs."""
        field = self.p.empty_state()
        for piece in chain.from_iterable(pieces(self.p.key_length, self.tile, 1)):
            field = self._fold(piece, field.recentred() if piece.recentres else field)
        for start in range(0, self.p.length, self.tile):
            self._read(start, field, target)
        return field

    def _fold(self, piece: Piece, field: FarField) -> FarField:
        keys = self.p.keys(piece.start, piece.stop - piece.start, 1)
        logs = self.p.features.of_keys(keys.y, self.p.dead_bias(keys.alive))[:, :, 0]
        grown = torch.maximum(field.max, logs.amax(-2))
        weights, decay = logs.sub_(grown[:, :, None]).exp_(), (field.max - grown).exp_()
        update = product_over_tokens(weights, keys.v[:, :, 0] - field.centre)
        return FarField(grown, *compensated.add(field.total, update, decay[..., None]), field.centre)

    def _shape(self, start: int, length: int) -> tuple[int, int]:
        return min(self.tile, length - start), 1

    def _sinks(self, x: Tensor, start: int, block: int) -> Tensor | None:
        if not self.p.sinks:
            return None
        return self.p.exact_logits(x, self.p.sink_y[:, :, None], self.p.sink_mask(start, block, 1))

    def _read(self, start: int, field: FarField, target: Target) -> None:
        block, blocks = self._shape(start, self.p.length)
        x = self.p.queries(start, block, blocks)
        logs, scalar = self.p.features.of_queries(x)
        logs += field.max[:, :, None, None]
        exact = self._sinks(x, start, block)
        reference = references(logs, exact, scalar)
        far, near = logs.sub_(reference.far[..., None]).exp_() @ field.sum[:, :, None], None
        if exact is not None:
            near = exact.sub_(reference.exact[..., None]).exp_() @ self.p.sink_values[:, :, None]
        self.p.put_rows(target, start, block, *normalise_centred(far, near, field.centre, reference))

    def backward(self, saved: Saved, field: FarField, into: Gradients) -> None:
        total = Total.of(torch.zeros_like(field.sum))
        for start in range(0, self.p.length, self.tile):
            total = compensated.add(total, self._read_backward(start, saved, field, into))
        grad_sum = total.high
        for first in range(0, self.p.key_length, self.tile):
            block, blocks = self._shape(first, self.p.key_length)
            keys = self.p.keys(first, block, blocks)
            logs = self.p.features.of_keys(keys.y, self.p.dead_bias(keys.alive))
            weights = (logs - field.max[:, :, None, None]).exp_()
            dv = weights @ grad_sum[:, :, None]
            dlogs = weights.mul_(keys.v @ grad_sum[:, :, None].mT)
            dy = self.p.features.keys_backward(keys.y, dlogs)
            self.p.add_key_gradients(into["k"], into["v"], first, block, dy, dv)

    def _read_backward(self, start: int, saved: Saved, field: FarField, into: Gradients) -> Tensor:
        block, blocks = self._shape(start, self.p.length)
        x = self.p.queries(start, block, blocks)
        grad, centred_grad, normaliser = self.p.output_gradient(saved, start, block, blocks, field.centre)
        logs, _ = self.p.features.of_queries(x)
        logs += field.max[:, :, None, None]
        weights = logs.sub_(normaliser[..., :1]).exp_()
        grad_sum = product_over_tokens(weights, grad)[:, :, 0]
        dlogs = weights.mul_(centred_grad @ field.sum[:, :, None].mT)
        dx = self.p.features.queries_backward(x, dlogs)
        exact = self._sinks(x, start, block)
        if exact is not None:
            seen = exact.sub_(normaliser[..., 1:]).exp_()
            sink_y, sink_v = self.p.sink_y[:, :, None], self.p.sink_values[:, :, None]
            more, dy, dv = self.p.exact_backward(x, sink_y, sink_v, seen, grad)
            dx += more
            self.p.add_sink_gradients(into, dy, dv)
        self.p.add_query_gradients(into["q"], start, block, dx)
        return grad_sum
