"""Moments of the pairs (q, k) that features have to get right, and the proposals made from them.

The error of an output is governed by the pairs that attention gives weight to, not by pairs at large: `calibrated`
weighs each pair by its attention. `optimal` and `sharp`, as published, take all pairs alike.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import calibration as checks
from subquad.features.proposals import Proposal, isotropic, shaped
from subquad.mechanism import normalised, repeat_heads
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.pairs import far_pairs, seen_pairs

RIDGE = 0.1  # of the mean eigenvalue; an inverse square root must not follow noise
FLOOR = 1e-3  # of the mean square, variance and mean together


class Moments(NamedTuple):
    """Weighted sums over pairs, float64: weight `[H]`, x, y `[H, D]`, xx, yy, xy `[H, D, D]`."""

    weight: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor

    def in_heads(self, heads: int) -> "Moments":
        """Summed over the heads that share a feature map."""
        return Moments(*(t.unflatten(0, (heads, -1)).sum(1) for t in self))

    def means(self) -> "Moments":
        """First moments divided by the weight, second ones centred."""
        x, y, xx, yy, xy = (t / self.weight.view(-1, *[1] * (t.dim() - 1)) for t in self[1:])
        outer = [a[:, :, None] * b[:, None] for a, b in ((x, x), (y, y), (x, y))]
        return Moments(self.weight, x, y, *(t - o for t, o in zip((xx, yy, xy), outer, strict=True)))


def sample_rows(call: Call, count: int, seed: int) -> Tensor:
    """At most `count` query positions, in order."""
    order = torch.randperm(call.q.shape[2], generator=torch.Generator("cpu").manual_seed(seed))
    return order[:count].sort().values.to(call.q.device)


def pair_moments(mechanism: FavorAttention, calls: Iterable[Call], *, rows: int, seed: int, alike: bool) -> Moments:
    """Moments of the far pairs of sampled rows: weighted by their attention, or all `alike`."""
    total = None
    for number, call in enumerate(calls):
        chosen = sample_rows(call, rows, seed + number)
        seen = seen_pairs(call, chosen)
        weights = normalised(seen.to(call.q.dtype)) if alike else call.exact_weights(chosen)
        weights = (weights * (seen & far_pairs(mechanism, call, chosen))).expand(-1, call.q.shape[1], -1, -1)
        x, y = (t.double() * call.scale**0.5 for t in (call.q[:, :, chosen], call.k))
        found = _sums(weights.double(), x, repeat_heads(y, x.shape[1]))  # centring cancels: float32 has too few digits
        total = found if total is None else Moments(*(a + b for a, b in zip(total, found, strict=True)))
    assert total is not None
    return total


def _sums(weights: Tensor, x: Tensor, y: Tensor) -> Moments:
    """weights `[B, H, R, S]`, x `[B, H, R, D]`, y `[B, H, S, D]`."""
    of_x, of_y = weights.sum(-1, keepdim=True), weights.sum(-2)[..., None]
    sums = (
        of_x.sum((2, 3)),
        (of_x * x).sum(2),
        (of_y * y).sum(2),
        (of_x * x).mT @ x,
        (of_y * y).mT @ y,
        x.mT @ (weights @ y),
    )
    return Moments(*(t.sum(0) for t in sums))


def weighted_moments(
    mechanism: FavorAttention, calls: Sequence[Call], map_heads: int, *, rows: int, seed: int, alike: bool = False
) -> Moments:
    """As `pair_moments`, summed to the heads of a map; heads that never look far away have all pairs alike."""
    moments = pair_moments(mechanism, calls, rows=rows, seed=seed, alike=alike).in_heads(map_heads)
    looks = moments.weight > 0
    if bool(looks.all()):
        return moments
    plain = pair_moments(mechanism, calls, rows=rows, seed=seed, alike=True).in_heads(map_heads)
    checks.some_far_rows(plain.weight, rows)
    return Moments(
        *(torch.where(looks.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(moments, plain, strict=True))
    )


def fitted_proposal(estimator: str, moments: Moments, *, width: float = 1.0) -> Proposal:
    """The proposal of "optimal", "sharp" or "calibrated" for moments of as many heads as the map has.

    width: of the spread of the pairs, to be less than 1 where a narrower "calibrated" one does better.
    """
    central = moments.means()
    mean = central.x + central.y
    spread = central.xx + central.yy + central.xy + central.xy.mT
    if estimator == "calibrated":
        return shaped(mean, width * spread)
    about_zero = spread + mean[:, :, None] * mean[:, None]
    if estimator == "sharp":
        return shaped(torch.zeros_like(mean), about_zero)
    return isotropic(about_zero.diagonal(dim1=1, dim2=2).mean(1), mean.shape[1])


def balancing(moments: Moments) -> tuple[Tensor, Tensor]:
    """T and its inverse transpose, `[heads, D, D]`, such that T x and T^-T y have the same covariance."""
    central = moments.means()
    xx, yy = _ridged(central.xx, central.x), _ridged(central.yy, central.y)
    root, inverse_root = _power(xx, 0.5), _power(xx, -0.5)
    middle = inverse_root @ _power(root @ yy @ root, 0.5) @ inverse_root
    return _power(middle, 0.5), _power(middle, -0.5)


def _ridged(covariance: Tensor, mean: Tensor) -> Tensor:
    """Keeps its distance from singular: where all weight is on one key, keys do not vary at all."""
    variance = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp(min=0)
    ridge = RIDGE * variance + FLOOR * (variance + mean.square().mean(1))
    eye = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device)
    return covariance + ridge.clamp(min=torch.finfo(torch.float64).tiny)[:, None, None] * eye


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values[:, None] ** exponent) @ vectors.mT


def transformed(moments: Moments, x_turn: Tensor, y_turn: Tensor) -> Moments:
    """Moments of T x and T^-T y."""
    m = moments
    x, y = ((t[:, None] @ turn.mT)[:, 0] for t, turn in ((m.x, x_turn), (m.y, y_turn)))
    return Moments(m.weight, x, y, x_turn @ m.xx @ x_turn.mT, y_turn @ m.yy @ y_turn.mT, x_turn @ m.xy @ y_turn.mT)
