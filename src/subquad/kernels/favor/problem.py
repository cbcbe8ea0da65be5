"""One FAVOR problem: the general one with a feature map, sinks, and a far field to start from.

Letters as in `blocks.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import problem
from subquad.kernels.blocks import to_blocks, window, with_ones
from subquad.kernels.centre import FarField, Rows, normalised_rows
from subquad.kernels.favor.inputs import FavorInputs, FavorOptions
from subquad.kernels.favor.logs import LogFeatures, half_square
from subquad.kernels.precision import bounded_
from subquad.kernels.problem import DEAD, FLOOR, Gradients, KeyTile, Problem


def tile_shape(heads: int, num_features: int, options: FavorOptions) -> tuple[int, int]:
    """Tokens per block and per tile (whole blocks). Without near blocks, blocks must halve without remainder;
    64 makes the scores of the own block about as dear as the state's."""
    block = options.near or 1 << ((options.chunk or 64).bit_length() - 1)
    tile = problem.TILE_ELEMENTS // (heads * num_features)
    if options.near and options.chunk:
        tile = options.chunk
    return block, max(1, tile // block) * block


def within_length(options: FavorOptions, length: int) -> FavorOptions:
    """Options that do the same: a chunk that is longer than the sequence is padding. `cut_block` cuts near blocks."""
    return options if options.near else options._replace(chunk=min(options.chunk, 1 << (length - 1).bit_length()))


def border_count(length: int, heads: int, num_features: int, options: FavorOptions) -> int:
    """How many states the forward keeps for the backward."""
    if not (options.borders and options.far):
        return 0
    if not options.causal and not options.near:
        return 1
    _, tile = tile_shape(heads, num_features, options)
    return problem.border_count(length, tile, num_features) * (1 if options.causal else 2)


class FavorProblem(Problem):
    def __init__(self, inputs: FavorInputs, options: FavorOptions, want_map: bool = False) -> None:
        super().__init__(inputs.q, inputs.k, inputs.v, inputs.alive, options.scale**0.5)
        options = within_length(options, max(self.length, self.key_length))
        self.inputs, self.options = inputs, options
        self.features = LogFeatures(inputs.feature_map(options), self.dtype, options.gaussian, want_map)
        self.num_features = inputs.num_features
        self.block, self.tile = tile_shape(self.batch * self.heads, self.num_features, options)
        # a near block longer than the sequence is the sequence; other blocks must stay powers of two, to be split
        self.cut_block = min(self.block, self.length) if options.near else self.block
        self.reach = min(options.reach, -(-self.length // self.cut_block))  # no block is farther away
        assert inputs.sink_k is not None
        assert inputs.sink_v is not None
        self.sinks = inputs.sink_k.shape[2]
        self.sink_y = bounded_(inputs.sink_k.to(self.dtype) * self.root)
        self.sink_values = with_ones(inputs.sink_v.to(self.dtype))

    def queries(self, start: int, block: int, blocks: int) -> Tensor:
        return bounded_(super().queries(start, block, blocks))

    def keys(self, first: int, block: int, blocks: int) -> KeyTile:
        tile = super().keys(first, block, blocks)
        bounded_(tile.y)
        return tile

    def empty_state(self) -> FarField:
        shape = (self.batch, self.key_heads, self.num_features)
        far_max = self.sink_y.new_full(shape, FLOOR)
        return FarField.plain(far_max, self.sink_y.new_zeros(*shape, self.value_dim + 1))

    def initial_state(self) -> FarField:
        if self.inputs.far_max is None or self.inputs.far_sum is None:
            return self.empty_state()
        return FarField.plain(self.inputs.far_max, self.inputs.far_sum)

    def dead_bias(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else torch.where(mask, 0.0, DEAD).to(self.dtype)

    def sink_mask(self, start: int, block: int, blocks: int) -> Tensor:
        """`[B or 1, 1, N, C, sinks]`: which sinks each row sees."""
        assert self.inputs.sink_seen is not None
        seen = to_blocks(window(self.inputs.sink_seen[:, None], start, start + block * blocks), block)
        return torch.arange(self.sinks, device=seen.device) < seen[..., None]

    def exact_logits(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """`x.y`, -inf where not seen. x `[B, K, N, R, D]`, y `[B, K, N, E, D]`, mask `[B or 1, 1, N, C, E]`."""
        logits = x @ y.mT
        if self.options.gaussian:
            logits -= half_square(y)[..., None, :]
        logits.unflatten(3, (self.groups, -1)).masked_fill_(~mask[:, :, :, None], -torch.inf)
        return logits

    def exact_backward(self, x: Tensor, y: Tensor, v: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values from normalised `weights` (consumed) and `grad` `[.., R, V]`."""
        dv = weights.mT @ grad
        dlogits = weights.mul_(grad @ v.mT)
        dy = dlogits.mT @ x
        if self.options.gaussian:
            dy.addcmul_(y, dlogits.sum(-2)[..., None], value=-1)
        return dlogits @ y, dy, dv

    def new_gradients(self) -> Gradients:
        names = ("q", "k", "v", "sink_k", "sink_v")
        return {name: self.zeros_like(getattr(self.inputs, name)) for name in names}

    def add_sink_gradients(self, into: Gradients, dy: Tensor, dv: Tensor) -> None:
        """dy `[B, K, N, sinks, D]`."""
        into["sink_k"].add_(dy.sum(2), alpha=self.root)
        into["sink_v"].add_(dv[..., :-1].sum(2))


class References(NamedTuple):
    """What a row's exponents are taken relative to: one point on two scales, `far + scalar` = `exact`.

    The features' scalar -|x|^2 / 2 can be huge. Were it added to the exact logits, it would round them; so each part is
    kept on its own scale, and the scalar touches only the one that does not matter in this row.
    """

    far: Tensor
    exact: Tensor


def references(far_logs: Tensor, exact_logits: Tensor | None, scalar: Tensor) -> References:
    """The largest exponent of each row. far_logs `[..., M]`, exact_logits `[..., E]`, scalar `[...]`."""
    far = far_logs.amax(-1)
    if exact_logits is None:
        return References(far, far)
    exact = exact_logits.amax(-1)
    return References(torch.maximum(far, exact - scalar), torch.maximum(exact, far + scalar))


def normalise(numerator: Tensor, reference: References) -> tuple[Tensor, Tensor]:
    """Output, and log-normalisers `[..., 2]` (far, exact), of `[..., V]` sums; zeros and -inf where nothing is seen."""
    weight = numerator[..., -1]
    out = numerator[..., :-1] / torch.where(weight > 0, weight, 1)[..., None]
    return out, _log_normalisers(weight, reference)


def normalise_centred(far: Tensor, near: Tensor | None, centre: Tensor, reference: References) -> tuple[Rows, Tensor]:
    """The same for sums over the far field about its centre, and over all else."""
    weight = far[..., -1] if near is None else far[..., -1] + near[..., -1]
    rows = normalised_rows(far, near, torch.where(weight > 0, weight, 1)[..., None], centre)
    return rows, _log_normalisers(weight, reference)


def _log_normalisers(weight: Tensor, reference: References) -> Tensor:
    log_weight = torch.where(weight > 0, weight, 0).log()
    return torch.stack([reference.far + log_weight, reference.exact + log_weight], dim=-1)
