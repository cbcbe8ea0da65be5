"""Learned feature maps of one layer, trained against the outputs of exact attention."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from subquad.calibration.moments import fitted_proposal, sample_rows, weighted_moments
from subquad.checks import calibration as checks
from subquad.features.learned import ExponentialFeatures, HedgehogFeatures
from subquad.features.positive import FeatureMap, draw_rows
from subquad.mechanism import repeat_heads
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.pairs import far_pairs, seen_pairs

TOKENS_PER_STEP = 1024  # queries of one step, all of whose keys take part
LEARNING_RATE = 0.05  # of maps whose W x has the deviation 2
RIDGE = 1e-2


def start_features(mechanism: FavorAttention, calls: Sequence[Call], *, rows: int, seed: int) -> None:
    """Sharp, rotated Hedgehog maps with a fitted offset; exponential ones from a calibrated draw."""
    features = mechanism.features
    if isinstance(features, HedgehogFeatures):
        features.start(*_sizes(calls, len(features.query)), seed)
        if features.offset_weight is not None:
            _fit_offset(mechanism, features, calls, rows=rows, seed=seed)
        return
    assert isinstance(features, ExponentialFeatures)
    heads, num_features, dim = features.query.shape
    moments = weighted_moments(mechanism, calls, heads, rows=rows, seed=seed)
    how = {"coupling": mechanism.coupling, "num_heads": heads, "seed": seed}
    features.start(draw_rows(dim, num_features, **how, proposal=fitted_proposal("calibrated", moments)))


def train_features(
    mechanism: FavorAttention,
    calls: Sequence[Call],
    *,
    steps: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Adam on the relative squared error of each head's output, over whole sequences."""
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters = list(mechanism.features.parameters())
    optimizer = torch.optim.Adam(_groups(mechanism), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    calls = [call.answered(call.exact(), exact=True) for call in calls]  # once, not in every step
    for step in range(steps):
        call = _some_sequences(calls[step % len(calls)], generator)
        with torch.enable_grad():
            loss = relative_loss(call.attend(mechanism), call.exact(), call.real)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(1)
    optimizer.zero_grad(set_to_none=True)  # later training must not start from these gradients
    checks.finite(parameters)


def relative_loss(out: Tensor, want: Tensor, real: Tensor) -> Tensor:
    """Squared error of each head relative to the size of its output, the mean over heads; 0 where there is none."""
    keep = real[:, None, :, None]
    wrong, size = (torch.where(keep, t, 0).square().sum((0, 2, 3)) for t in (out - want, want))
    return (wrong * torch.where(size > 0, 1 / size, 0.0)).mean()


def _groups(mechanism: FavorAttention) -> list[dict]:
    """Rates follow the size of the maps, so that they do not depend on the scale of queries and keys."""
    groups = []
    for name, parameter in mechanism.features.named_parameters():
        is_map = name in ("query", "key")
        size = parameter.detach().std().item() / (2 / parameter.shape[-1] ** 0.5) if is_map else 1.0
        groups.append({"params": [parameter], "lr": LEARNING_RATE * size})
    return groups


def _some_sequences(call: Call, generator: torch.Generator) -> Call:
    """As many as make a step."""
    count = max(1, TOKENS_PER_STEP // call.q.shape[2])
    if count >= len(call.q):
        return call
    return call.sequences(torch.randperm(len(call.q), generator=generator)[:count].to(call.q.device))


def _sizes(calls: Sequence[Call], map_heads: int) -> tuple[Tensor, Tensor]:
    """Root mean squares of the entries of x and y for each head of the map."""
    x = [(call.q, call.real, call.scale) for call in calls]
    y = [(call.k, call.key_mask, call.scale) for call in calls]
    return _root_mean_square(x, map_heads), _root_mean_square(y, map_heads)


def _root_mean_square(parts: Sequence[tuple[Tensor, Tensor | None, float]], map_heads: int) -> Tensor:
    """Of real tokens; parts: tokens `[B, H, T, D]`, which are real `[B, T]`, and the scale."""
    squares, count = torch.zeros(map_heads, dtype=torch.float64), 0
    for x, mask, scale in parts:
        x = repeat_heads(x, max(map_heads, x.shape[1])).double()
        keep = torch.ones_like(x[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        found = torch.where(keep[:, None, :, None], x, 0).square().sum((0, 2, 3)) * scale
        squares = squares + found.unflatten(0, (map_heads, -1)).mean(1).cpu()
        count += int(keep.sum()) * x.shape[3]
    return (squares / count).sqrt()


@torch.no_grad()
def _fit_offset(
    mechanism: FavorAttention, features: HedgehogFeatures, calls: Sequence[Call], *, rows: int, seed: int
) -> None:
    """Ridge regression of log(exact far mass) - log(estimated far mass) on [1, x], where far and near compete."""
    assert features.offset_weight is not None
    assert features.offset_bias is not None
    features.offset_weight.zero_()
    features.offset_bias.zero_()
    inputs, targets, weights = zip(
        *(_far_mass(mechanism, call, sample_rows(call, rows, seed + i)) for i, call in enumerate(calls)),
        strict=True,
    )
    map_heads = len(features.offset_bias)
    x, target, weight = (
        torch.cat([t.transpose(0, 1).flatten(1, 2) for t in parts], 1).unflatten(0, (map_heads, -1)).flatten(1, 2)
        for parts in (inputs, targets, weights)
    )  # [map heads, rows of all heads that share it, ...]
    checks.some_far_rows(weight.sum(1), rows)
    x = torch.cat([torch.ones_like(x[..., :1]), x], -1)
    left = (weight[..., None] * x).mT @ x + RIDGE * weight.sum(1)[:, None, None] * torch.eye(x.shape[-1]).to(x)
    right = ((weight * target)[..., None] * x).sum(1)
    solution = torch.linalg.solve(left, right)
    features.offset_bias.copy_(solution[:, 0])
    features.offset_weight.copy_(solution[:, 1:])


def _far_mass(mechanism: FavorAttention, call: Call, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x `[B, H, R, D]`, how much the log of its far mass is underestimated, and how much that matters `[B, H, R]`."""
    x, y = (t.double() * call.scale**0.5 for t in (call.q[:, :, rows], call.k))
    y = repeat_heads(y, x.shape[1])
    seen = seen_pairs(call, rows)
    far = seen & far_pairs(mechanism, call, rows)
    logits = x @ y.mT
    estimate = _log_hedgehog_estimate(x, y, mechanism.feature_map)
    if call.gaussian:
        logits, estimate = (t - (y.square().sum(-1) / 2)[:, :, None] for t in (logits, estimate))
    exact = logits.masked_fill(~far, -torch.inf).logsumexp(-1)
    share = (exact - logits.masked_fill(~seen, -torch.inf).logsumexp(-1)).exp()
    estimate = estimate.masked_fill(~far, -torch.inf).logsumexp(-1)
    exists = far.any(-1).expand_as(exact)
    weight = torch.where(exists, share * (1 - share) + 1e-3, 0.0)
    return x, torch.where(exists, exact - estimate, 0.0), weight


def _log_hedgehog_estimate(x: Tensor, y: Tensor, map: FeatureMap) -> Tensor:
    """`[B, H, R, S]`. Features are shares, so their products need no logarithms, and memory no feature dimension."""
    shares = []
    for tokens, weight in ((x, map.query), (y, map.key)):
        logs = tokens @ _for_heads(weight, x).mT
        shares.append(logs.unflatten(-1, (map.groups, -1)).softmax(-1).flatten(-2))
    estimate = (shares[0] @ shares[1].mT).clamp(min=torch.finfo(x.dtype).tiny).log()
    if map.offset_weight is None or map.offset_bias is None:
        return estimate
    return estimate + x @ _for_heads(map.offset_weight, x)[..., None] + _for_heads(map.offset_bias, x)[:, None, None]


def _for_heads(tensor: Tensor, x: Tensor) -> Tensor:
    """`[map heads, ...]` for each of the heads of x."""
    return tensor.to(x).repeat_interleave(x.shape[1] // tensor.shape[0], 0)
