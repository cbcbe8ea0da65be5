"""The far field, whose values are summed up as differences from a centre.

The gradient of a query is made of differences g.S_r - (g.o) z_r, where S_r and z_r are feature r's sums of values and
of ones. Where values have a mean, both terms are larger than their difference by far: by the square root of the number
of tokens, if tokens are independent. So would be the rounding errors of both sums, and of o. With
S'_r = S_r - c z_r the difference is g.S'_r - g.(o - c) z_r, and its terms are small where c is that mean. In long
sequences o is kept with eight more bits.

Nothing depends on the centre but rounding. It is chosen from what was folded before, so that no later token can touch
an earlier row by it; and the far field alone is centred: exact parts and a block's own keys are what they are.

Letters as in `blocks.py`.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.compensated import Total

FIRST = 512  # tokens: before, the terms are not large enough
STEPS = 4  # centres are chosen so often while the number of tokens doubles
LOW = torch.int8  # what the rounding of outputs is kept in
LOW_FROM = 1 << 15  # tokens: before, that rounding is worth less than 1e-5 of a query's gradient
AGREEMENT = 1 / 16  # variance of the features' means over their mean squared; with more, the terms are not that large


class FarField(NamedTuple):
    """max `[B, K, M]` (or `[B, K, 1]`), sum `[B, K, M, V]`, low: what rounding left out of it, centre `[B, K, 1, V]`,
    whose last number is 0.
    """

    max: Tensor
    sum: Tensor
    low: Tensor
    centre: Tensor

    @classmethod
    def plain(cls, far_max: Tensor, far_sum: Tensor) -> "FarField":
        """From sums of the values themselves."""
        return cls(far_max, far_sum, torch.zeros_like(far_sum), torch.zeros_like(far_sum[:, :, :1]))

    @classmethod
    def from_border(cls, far_max: Tensor, border: Tensor) -> "FarField":
        return cls(far_max, *Total.of(border[:, :, :-1]), border[:, :, -1:])

    @property
    def total(self) -> Total:
        return Total(self.sum, self.low)

    def border(self) -> Tensor:
        """`[B, K, M + 1, V]`: the sums, and the centre as one more row."""
        return torch.cat([self.sum, self.centre], 2)

    def plain_sum(self) -> Tensor:
        return torch.addcmul(self.sum, self.sum[..., -1:], self.centre)

    def recentred(self) -> "FarField":
        total, far_sum = self.sum[..., -1:], self.plain_sum()
        centre = F.pad(_agreed_mean(far_sum[..., :-1], total), (0, 1))
        return self._replace(sum=torch.addcmul(self.sum, total, self.centre - centre), centre=centre)


class Rows(NamedTuple):
    """Outputs `[..., Dv]`, and what rounding left out of them."""

    out: Tensor
    low: Tensor

    @classmethod
    def unpacked(cls, out: Tensor, packed: Tensor) -> "Rows":
        return cls(out, packed.to(out.dtype) * _unit_of_low(out))

    def packed_low(self) -> Tensor:
        """Eight bits of each number."""
        return torch.nan_to_num(self.low / _unit_of_low(self.out)).clamp(-127, 127).to(LOW)


def _unit_of_low(out: Tensor) -> Tensor:
    """A 127th of what the largest number of a row may be rounded by, twice."""
    return torch.linalg.vector_norm(out, torch.inf, -1, keepdim=True) * (torch.finfo(out.dtype).eps / 127)


def normalised_rows(far: Tensor, near: Tensor | None, total: Tensor, centre: Tensor) -> Rows:
    """From what rows read of a far field `[B, K, N, R, V]`, and of all else (None: nothing), over their normaliser."""
    far_share = far[..., -1:] / total
    sums, near_share = far[..., :-1], torch.zeros_like(far_share)
    if near is not None:
        sums, near_share = sums + near[..., :-1], near[..., -1:] / total
    # where the far field matters, a row is the centre and a small difference; else the centre, maybe large, is left out
    mostly_far = far_share >= 0.5
    origin = mostly_far * centre[:, :, None, :, :-1]
    more = torch.addcmul(sums / total, torch.where(mostly_far, -near_share, far_share), centre[:, :, None, :, :-1])
    out = origin + more
    return Rows(out, more - (out - origin))


def merged_rows(one: Rows, other: Rows, share: Tensor, other_share: Tensor) -> Rows:
    """Two parts of the same rows under one normaliser; the smaller one pulls at the larger one."""
    larger = share > other_share
    smaller_share = torch.where(larger, other_share, -share)
    origin, origin_low = (torch.where(larger, x, y) for x, y in zip(one, other, strict=True))
    pull, pull_low = (smaller_share * (y - x) for x, y in zip(one, other, strict=True))
    out = origin + pull
    return Rows(out, origin_low + pull_low + (pull - (out - origin)))


def _agreed_mean(sums: Tensor, totals: Tensor) -> Tensor:
    """The mean over features of `sums / totals`, weighted by the totals; 0 where the features do not agree on it."""
    weights = totals.abs()
    means = torch.where(weights > 0, sums / totals, 0)
    mass = weights.sum(2, keepdim=True)
    mean, square = ((weights * x).sum(2, keepdim=True) / mass for x in (means, means.square()))
    return torch.where(square < (1 + AGREEMENT) * mean.square(), mean, 0)  # never with NaN, nor with infinite squares


def is_due(before: int, now: int) -> bool:
    """Whether a centre is to be chosen after `now` tokens, when the last occasion was after `before`."""
    unit = max(1, (1 << now.bit_length() - 1) // STEPS) if now else 1
    return now >= FIRST and now // unit * unit > before


class Piece(NamedTuple):
    """Tokens `[start, stop)` that are folded about one centre."""

    start: int
    stop: int
    recentres: bool  # which is chosen before them

    def blocks(self, block: int) -> int:
        return -(-(self.stop - self.start) // block)


def pieces(length: int, tile: int, block: int, reverse: bool = False) -> list[list[Piece]]:
    """The pieces of each tile, in the order of a sweep. The first tile is cut: it may be long, and finds no centre."""
    tiles = [range(length)[start : start + tile] for start in range(0, length, tile)]
    found, before, passed = [], 0, 0
    for number, tokens in enumerate(tiles[::-1] if reverse else tiles):
        found.append([])
        for part in [tokens] if number else _doubling_parts(tokens, block, reverse):
            found[-1].append(Piece(part.start, part.stop, is_due(before, passed)))
            before, passed = passed, passed + len(part)
    return found


def _doubling_parts(tokens: range, block: int, reverse: bool) -> list[range]:
    """Whole blocks, each part as long as all before it."""
    cut, cuts = max(1, FIRST // block) * block, []
    while cut < len(tokens):
        cuts.append(cut)
        cut *= 2
    if reverse:
        whole = -(-len(tokens) // block) * block
        cuts = [whole - cut for cut in reversed(cuts)]
    parts = [tokens[start:stop] for start, stop in pairwise([0, *cuts, len(tokens)])]
    return parts[::-1] if reverse else parts
