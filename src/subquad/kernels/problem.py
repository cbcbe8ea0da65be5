"""One attention problem, cut into tiles on demand: what the linear and the FAVOR engine share.

Letters as in `blocks.py`. Values carry a column of ones, so that one product gives numerator and normaliser.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.blocks import add_window, from_blocks, to_blocks, window, with_ones
from subquad.kernels.centre import LOW, LOW_FROM, Piece, Rows
from subquad.kernels.compensated import Total

FLOOR = -1e30  # running maximum of no key at all: finite, because -inf - -inf is NaN
DEAD = -1e32  # log-weight of a key that does not count: exp(DEAD - FLOOR) is 0
NOWHERE = math.inf  # normaliser of a row that sees nothing: dividing by it leaves no weight and no gradient

TILE_ELEMENTS = 1 << 20  # features per tile: a few such tensors fit a shared cache


def tiles_per_border(tile: int, num_features: int) -> int:
    """States are kept for the backward every so many tiles: a state is M x V numbers, so that 4 M tokens apart they
    are fewer than the values."""
    return max(1, 4 * num_features // tile)


def border_count(length: int, tile: int, num_features: int) -> int:
    tiles = -(-length // tile)
    return -(-tiles // tiles_per_border(tile, num_features))


def between_borders(tiles: list[list[Piece]], tile: int, num_features: int) -> list[list[Piece]]:
    """The pieces that follow each border, in the order of the sweep."""
    step = tiles_per_border(tile, num_features)
    return [list(chain.from_iterable(tiles[i : i + step])) for i in range(0, len(tiles), step)]


@dataclass
class KeyTile:
    """Scaled keys `[B, K, N, C, D]`, values `[B, K, N, C, V]`, and what is alive among them `[B or 1, 1, N, C]`."""

    first: int
    y: Tensor
    v: Tensor
    alive: Tensor | None


class Outputs(NamedTuple):
    """What a forward gives.

    out `[B, H, T, Dv]`; normaliser `[B, H, T]`, of FAVOR `[B, H, T, 2]` logarithms (far, exact); low: what rounding
    left out of the output, empty where nothing needs it. States that the backward starts from: borders_max
    `[borders, B, K, M]` (or `[.., 1]`), borders_sum `[borders, B, K, M + 1, V]`, whose last row is the centre. far_max,
    far_sum: the state after the last token, empty unless causal.
    """

    out: Tensor
    normaliser: Tensor
    low: Tensor
    borders_max: Tensor
    borders_sum: Tensor
    far_max: Tensor
    far_sum: Tensor


class Saved(NamedTuple):
    """What a backward gets of the forward, and the gradients of output and last state. low, grad_far_sum: or None."""

    grad_out: Tensor
    out: Tensor
    normaliser: Tensor
    low: Tensor | None
    borders_max: Tensor
    borders_sum: Tensor
    grad_far_sum: Tensor | None

    def last_state_gradient(self) -> Total:
        grad = self.grad_far_sum
        return Total.of(torch.zeros_like(self.borders_sum[0, :, :, :-1]) if grad is None else grad)


Gradients = dict[str, Tensor]  # by the name of the input


class Target(NamedTuple):
    """Where rows go: outputs `[B, H, T, Dv]`, normaliser(s) `[B, H, T, ..]`, and low parts of outputs, or nothing."""

    out: Tensor
    normaliser: Tensor
    low: Tensor


def keeps_low(q: Tensor, borders: bool) -> bool:
    """Whether the backward gets what rounding left out of the outputs: not in half precision, whose own is larger."""
    return borders and q.shape[2] >= LOW_FROM and q.dtype in (torch.float32, torch.float64)


class OutputGradient(NamedTuple):
    """plain: `[g, -g.o]` `[B, K, N, R, V]`, whose product with `[v, 1]` is g.(v - o). centred: `[g, -g.(o - c)]`, for
    sums of v - c. normaliser `[B, K, N, R, ..]`."""

    plain: Tensor
    centred: Tensor
    normaliser: Tensor


class Problem:
    """Queries and keys are scaled by `root` as they are read. alive `[B or 1, S]` bool: keys that count (None: all);
    sinks of `favor` are counted elsewhere."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, alive: Tensor | None, root: float) -> None:
        self.q, self.k, self.v, self.alive, self.root = q, k, v, alive, root
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.batch, self.heads, self.length, _ = q.shape
        self.key_heads, self.key_length = k.shape[1], k.shape[2]
        self.groups = self.heads // self.key_heads
        self.value_dim = v.shape[-1]

    def queries(self, start: int, block: int, blocks: int) -> Tensor:
        """Scaled queries `[B, K, N, R, D]`."""
        return to_blocks(self._cast(self.q, start, block * blocks) * self.root, block, self.groups)

    def keys(self, first: int, block: int, blocks: int) -> KeyTile:
        y = to_blocks(self._cast(self.k, first, block * blocks) * self.root, block)
        v = to_blocks(with_ones(self._cast(self.v, first, block * blocks)), block)
        alive = self.mask(self.alive, first, block, blocks)
        if alive is not None:  # whatever a dead key holds, NaN included, must not be multiplied by its weight 0
            y = y.masked_fill_(~alive[..., None], 0)
            v = v.masked_fill_(~alive[..., None], 0)
        return KeyTile(first, y, v, alive)

    def mask(self, mask: Tensor | None, first: int, block: int, blocks: int) -> Tensor | None:
        """`[B or 1, 1, N, C]`, or None where every key of the tile counts."""
        last = first + block * blocks
        if mask is None:
            if first >= 0 and last <= self.key_length:
                return None
            mask = torch.ones(1, self.key_length, dtype=torch.bool, device=self.k.device)
        return to_blocks(window(mask[:, None], first, last), block)

    def output_gradient(self, saved: Saved, start: int, block: int, blocks: int, centre: Tensor) -> "OutputGradient":
        """centre `[B, K, 1, V]`."""
        stop = start + block * blocks

        def rows(x: Tensor) -> Tensor:
            return to_blocks(window(x, start, stop), block, self.groups)

        grad_out, out = rows(saved.grad_out).to(self.dtype), rows(saved.out).to(self.dtype)
        centre = centre[:, :, None, :, :-1]
        centred = out - centre
        if saved.low is not None:
            centred += Rows.unpacked(out, rows(saved.low)).low
        dot = (grad_out * centred).sum(-1, keepdim=True)
        whole_dot = dot + grad_out @ centre.mT
        normaliser = to_blocks(window(saved.normaliser, start, stop, fill=NOWHERE), block, self.groups)
        return OutputGradient(
            torch.cat([grad_out, -whole_dot], dim=-1), torch.cat([grad_out, -dot], dim=-1), normaliser
        )

    def causal_scores(self, scores: Tensor, block: int) -> Tensor:
        """Zeroes, in place, what lies after a row's own position. `[B, K, N, R, C]`."""
        scores.unflatten(3, (self.groups, block)).tril_()
        return scores

    def new_target(self, normalisers: tuple[int, ...], borders: bool) -> Target:
        shape = (*self.q.shape[:3], self.value_dim)
        out = self.q.new_empty(*shape, dtype=self.dtype)
        low = self.q.new_empty(shape if keeps_low(self.q, borders) else (0,), dtype=LOW)
        return Target(out, out.new_empty(*shape[:3], *normalisers), low)

    def put_rows(self, target: Target, start: int, block: int, rows: Rows, normaliser: Tensor) -> None:
        pairs = [(target.out, rows.out), (target.normaliser, normaliser)]
        if target.low.numel():
            pairs.append((target.low, rows.packed_low()))
        for into, x in pairs:
            x = from_blocks(x, block, self.groups)
            stop = min(start + x.shape[2], into.shape[2])
            into[:, :, start:stop] = x[:, :, : stop - start]

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=self.dtype, device=tensor.device)

    def add_key_gradients(self, dk: Tensor, dv: Tensor, first: int, block: int, dy: Tensor, dvalues: Tensor) -> None:
        add_window(dk, first, from_blocks(dy, block) * self.root)
        add_window(dv, first, from_blocks(dvalues[..., :-1], block))

    def add_query_gradients(self, dq: Tensor, start: int, block: int, dx: Tensor) -> None:
        add_window(dq, start, from_blocks(dx, block, self.groups) * self.root)

    def _cast(self, x: Tensor, start: int, length: int) -> Tensor:
        return window(x, start, start + length).to(self.dtype)
