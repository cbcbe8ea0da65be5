"""What one layer is asked and how well it answers, head by head, on sampled rows.

Exact attention is computed for those rows only, in float32 or better; the layer itself runs on whole sequences.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.calibration.errors import ErrorSum
from subquad.calibration.heads import Heads
from subquad.calibration.moments import far_pairs, seen_pairs
from subquad.features.drawn import DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.mechanism import masked_softmax, normalised, repeat_heads
from subquad.mechanisms.favor import FavorAttention, log_features

WINDOW = 64  # tokens per block of the window baseline, for layers without near blocks


class Fidelity(NamedTuple):
    """Relative errors of the outputs against exact attention, float64 `[H]`.

    error: of the layer. uniform: of the mean of all visible values. near: of exact attention within the layer's near
    blocks and sinks alone (blocks of WINDOW where it has none); None in cross-attention, where nothing is near.
    """

    error: Tensor
    uniform: Tensor
    near: Tensor | None


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


class Sample(NamedTuple):
    """One sequence, some of its real rows, and what exact attention makes of them."""

    heads: Heads  # of batch size 1
    rows: Tensor  # [R]
    seen: Tensor  # bool [1, 1, R, S]
    logits: Tensor  # [1, H, R, S]

    @property
    def values(self) -> Tensor:
        """`[1, H, S, Dv]`: 0 where a key is masked, as 0 * NaN is NaN."""
        v, mask = self.heads.v, self.heads.key_mask
        v = v if mask is None else v.masked_fill(~mask[:, None, :, None], 0)
        return repeat_heads(v, self.heads.q.shape[1]).to(self.logits.dtype)


def samples(batches: Sequence[Heads], rows: int, seed: int) -> Iterator[Sample]:
    """Every sequence with at most `rows` of its real rows: always the same ones."""
    for number, batch in enumerate(batches):
        for index in range(len(batch.q)):
            heads = batch.sequences(torch.tensor([index], device=batch.q.device))
            places = heads.real[0].nonzero()[:, 0]
            generator = torch.Generator("cpu").manual_seed(derived_seed(seed, number, index))
            chosen = torch.randperm(len(places), generator=generator)[:rows].sort().values
            if len(chosen):
                yield _sample(heads, places[chosen.to(places.device)])


def _sample(heads: Heads, rows: Tensor) -> Sample:
    return Sample(heads, rows, seen_pairs(heads, rows), heads.precise().logits(rows))


@torch.no_grad()
def fidelity(mechanism: FavorAttention, batches: Sequence[Heads], *, rows: int, seed: int) -> Fidelity:
    """Errors of the layer and of the two baselines that it must beat."""
    error, uniform, near = ErrorSum(), ErrorSum(), ErrorSum()
    for sample in samples(batches, rows, seed):
        heads, values = sample.heads, sample.values
        real = heads.real[:, sample.rows]
        exact = masked_softmax(sample.logits, sample.seen) @ values
        error.add(heads.attend(mechanism)[:, :, sample.rows], exact, real)
        uniform.add((normalised(sample.seen.to(values.dtype)) @ values).expand_as(exact), exact, real)
        if _comparable(heads):
            close = sample.seen & ~far_pairs(_with_window(mechanism), heads, sample.rows)
            near.add(masked_softmax(sample.logits, close) @ values, exact, real)
    return Fidelity(error.errors, uniform.errors, near.errors if near.size is not None else None)


def _comparable(heads: Heads) -> bool:
    return heads.q.shape[2] == heads.k.shape[2]


def _with_window(mechanism: FavorAttention) -> FavorAttention:
    """A layer with near blocks: this one, if it has any."""
    if mechanism.options.near:
        return mechanism
    return FavorAttention(mechanism.head_dim, 1, near=WINDOW, sinks=mechanism.options.sinks)


@torch.no_grad()
def anatomy(mechanism: FavorAttention, batches: Sequence[Heads], *, rows: int, seed: int) -> Anatomy:
    """Sizes, sharpness, and how many features do the work."""
    lows, highs, entropies, used = [], [], [], []
    for sample in samples(batches, rows, seed):
        lows.append(sample.logits.masked_fill(~sample.seen, torch.inf).amin((0, 2, 3)))
        highs.append(sample.logits.masked_fill(~sample.seen, -torch.inf).amax((0, 2, 3)))
        weights = masked_softmax(sample.logits, sample.seen)
        entropies.append(-torch.special.xlogy(weights, weights).sum(-1)[0])
        used.append(effective_features(mechanism, sample))
    return Anatomy(
        _mean_norms([(heads.q, heads.real, heads.scale) for heads in batches]),
        repeat_heads(_mean_norms([(heads.k, heads.key_mask, heads.scale) for heads in batches])[None], len(lows[0]))[0],
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
    heads = sample.heads
    far = (sample.seen & far_pairs(mechanism, heads, sample.rows))[0, 0]
    some, far = sample.rows[far.any(-1)], far[far.any(-1)]
    if mechanism.trigonometric or not len(some):
        return heads.q.new_zeros(heads.q.shape[1], 0, dtype=torch.float64)
    log_phi, log_psi = _log_features(mechanism, heads, some)
    shares = [(phi + far_log_sums(psi, far)).softmax(-1) for phi, psi in zip(log_phi, log_psi, strict=True)]
    return 1 / torch.stack(shares).square().sum(-1)


def _log_features(mechanism: FavorAttention, heads: Heads, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[H, R, M]` of the queries `rows`, `[H, S, M]` of all keys; the kernel's weights of keys included."""
    dtype = torch.promote_types(heads.q.dtype, torch.float32)
    x, y = (t.to(dtype) * heads.scale**0.5 for t in (heads.q[:, :, rows], heads.k))
    y = repeat_heads(y, x.shape[1])
    weight = y.square().sum(-1, keepdim=True) / 2 if heads.gaussian else torch.zeros_like(y[..., :1])
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
