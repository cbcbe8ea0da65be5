"""What one layer is asked, head by head, on sampled rows: sizes, sharpness, and the features that do the work."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.features.drawn import DrawnFeatures
from subquad.mechanism import masked_softmax, repeat_heads
from subquad.mechanisms.favor import FavorAttention, log_features
from subquad.recording.calls import Call
from subquad.recording.pairs import far_pairs
from subquad.recording.samples import Sample, samples


class Anatomy(NamedTuple):
    """Of each head, float64 `[H]`, with x = sqrt(scale) q and y = sqrt(scale) k.

    query_norm, key_norm: mean |x| and |y| of real tokens. logit_min, logit_max: of visible pairs, x.y (for the Gaussian
    kernel x.y - |y|^2 / 2). entropy: of exact attention, mean over rows, nats. effective_features: 1 / sum_r alpha_r^2,
    alpha the shares of the features in the far field, mean over rows that have one; None for signed features, NaN in
    heads without a far field.
    """

    query_norm: Tensor
    key_norm: Tensor
    logit_min: Tensor
    logit_max: Tensor
    entropy: Tensor
    effective_features: Tensor | None


@torch.no_grad()
def anatomy(mechanism: FavorAttention, calls: Sequence[Call], *, rows: int, seed: int) -> Anatomy:
    """Sizes, sharpness, and how many features do the work."""
    lows, highs, entropies, used = [], [], [], []
    for sample in samples(calls, rows, seed):
        lows.append(sample.logits.masked_fill(~sample.seen, torch.inf).amin((0, 2, 3)))
        highs.append(sample.logits.masked_fill(~sample.seen, -torch.inf).amax((0, 2, 3)))
        weights = masked_softmax(sample.logits, sample.seen)
        entropies.append(-torch.special.xlogy(weights, weights).sum(-1)[0])
        used.append(effective_features(mechanism, sample))
    return Anatomy(
        _mean_norms([(call.q, call.real, call.scale) for call in calls]),
        repeat_heads(_mean_norms([(call.k, call.key_mask, call.scale) for call in calls])[None], len(lows[0]))[0],
        torch.stack(lows).amin(0).double().cpu(),
        torch.stack(highs).amax(0).double().cpu(),
        torch.cat(entropies, 1).double().mean(1).cpu(),
        None if mechanism.trigonometric else torch.cat(used, 1).mean(1).cpu(),
    )


def _mean_norms(parts: Sequence[tuple[Tensor, Tensor | None, float]]) -> Tensor:
    """float64 `[H]`, of real tokens; parts: tokens `[B, H, T, D]`, which are real `[B, T]`, and the scale."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for x, mask, scale in parts:
        keep = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        norms = torch.where(keep[:, None], x.double().norm(dim=-1) * scale**0.5, 0)
        total, count = total + norms.sum((0, 2)).cpu(), count + int(keep.sum())
    return total / count


def effective_features(mechanism: FavorAttention, sample: Sample) -> Tensor:
    """float64 `[H, rows with a far field]`: 1 for one feature that does everything, M for all alike."""
    call = sample.call
    far = (sample.seen & far_pairs(mechanism, call, sample.rows))[0, 0]
    some, far = sample.rows[far.any(-1)], far[far.any(-1)]
    if mechanism.trigonometric or not len(some):
        return call.q.new_zeros(call.q.shape[1], 0, dtype=torch.float64)
    log_phi, log_psi = _log_features(mechanism, call, some)
    shares = [(phi + far_log_sums(psi, far)).softmax(-1) for phi, psi in zip(log_phi, log_psi, strict=True)]
    return 1 / torch.stack(shares).square().sum(-1)


def _log_features(mechanism: FavorAttention, call: Call, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[H, R, M]` of the queries `rows`, `[H, S, M]` of all keys; the kernel's weights of keys included."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    x, y = (t.to(dtype) * call.scale**0.5 for t in (call.q[:, :, rows], call.k))
    y = repeat_heads(y, x.shape[1])
    weight = y.square().sum(-1, keepdim=True) / 2 if call.gaussian else torch.zeros_like(y[..., :1])
    features = mechanism.features
    if isinstance(features, DrawnFeatures) and features.query_transform is not None:
        x, y = (_turned(t, turn) for t, turn in ((x, features.query_transform), (y, features.key_transform)))
    log_phi, log_psi = log_features(x, y, mechanism.feature_map)
    return log_phi[0], (log_psi - weight)[0]


def _turned(x: Tensor, turn: Tensor | None) -> Tensor:
    """`turn @ x` for each token. x `[1, H, T, D]`, turn `[1 or K, D, D]`."""
    assert turn is not None
    return x @ repeat_heads(turn[None].to(x.dtype), x.shape[1]).mT


def far_log_sums(log_psi: Tensor, far: Tensor) -> Tensor:
    """log sum over the far keys of psi_r(y), float64 `[R, M]`. log_psi `[S, M]`; far bool `[R, S]`, none empty."""
    log_psi, far = log_psi[far.any(0)].double(), far[:, far.any(0)]
    top = log_psi.amax(0)
    sums = far.double() @ (log_psi - top).exp()
    out = sums.log() + top
    for row in (sums == 0).any(-1).nonzero()[:, 0]:  # another row's far keys are larger by hundreds of nats
        out[row] = log_psi[far[row]].logsumexp(0)
    return out
