"""Positive feature maps of exp(x.y), as data: the engines know this form and nothing about where it came from.

With x = sqrt(scale) q and y = sqrt(scale) k,

    log phi_r(x) = Wq_r.x          + s(x)      + offset(x)
    log psi_r(y) = Wk_r.y + bias_r + s(y)

and exp(x.y) is estimated by sum_r phi_r(x) psi_r(y). `rule` names s: "none", "norm" (-|x|^2 / 2, all random
features), "groups" (minus the log-sum-exp within each of `groups` equal groups of features, learned maps).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad import checks
from subquad.features.draws import check_coupling, gaussian_rows
from subquad.features.proposals import Proposal, log_density_ratio


class FeatureMap(NamedTuple):
    """Wq, Wk `[heads or 1, M, D]`, bias `[heads or 1, M]`; `heads` are key heads (or query heads, for both maps)."""

    query: Tensor
    key: Tensor
    key_bias: Tensor
    rule: str = "norm"
    groups: int = 1
    offset_weight: Tensor | None = None
    offset_bias: Tensor | None = None

    @property
    def num_features(self) -> int:
        return self.query.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]


class Rows(NamedTuple):
    """Drawn rows `[heads, M, D]` and the logarithms of their weights `[heads, M]`, float32."""

    weight: Tensor
    log_weight: Tensor


def _log_share(num_features: int) -> float:
    """Of one feature in the mean over all."""
    return -math.log(num_features)


def positive_map(weight: Tensor, log_weight: Tensor | None = None, dtype: torch.dtype = torch.float64) -> FeatureMap:
    """The unbiased map whose rows are `weight` `[heads or 1, M, D]`, with weights `log_weight` `[heads or 1, M]`.

    dtype: of the inputs it is for. log M must not cost float64 its digits, and a sum should be rounded once; but if it
    stands alone and will be float32 anyway, it is made so: with every token decoded, it is made again.
    """
    heads, num_features, _ = weight.shape
    single = (log_weight is None and dtype != torch.float64) or weight.device.type == "mps"
    dtype = torch.float32 if single else torch.float64
    bias = weight.new_full((heads, num_features), _log_share(num_features), dtype=dtype)
    return FeatureMap(weight, weight, bias if log_weight is None else bias + log_weight)


@functools.lru_cache(maxsize=64)
def _kept_bias(heads: int, num_features: int) -> Tensor:
    with torch.inference_mode(False):  # whoever comes first may be in it, and others may need gradients
        return torch.full((heads, num_features), _log_share(num_features), dtype=torch.float32, device="cpu")


def positive_map_of_step(weight: Tensor) -> FeatureMap:
    """`positive_map` of rows without weights, for one token on a CPU: its bias is made once, not with every token."""
    heads, num_features, _ = weight.shape
    return FeatureMap(weight, weight, _kept_bias(heads, num_features))


def draw_rows(
    head_dim: int,
    num_features: int,
    *,
    coupling: str,
    num_heads: int | None,
    seed: int,
    mirrored: bool = False,
    proposal: Proposal | None = None,
) -> Rows:
    """Rows from the proposal, N(0, I) if None, on the default device; same seed, same bits.

    mirrored: every row with both signs ("hyperbolic"), which halves the draws.
    """
    check_coupling("favor", coupling, checks.count("favor", "head_dim", head_dim))
    checks.count("favor", "num_features", num_features)
    heads = checks.optional_count("favor", "num_heads", num_heads) or 1
    generator = torch.Generator("cpu").manual_seed(checks.seed("favor", seed))
    if mirrored and num_features % 2:
        raise checks.odd_hyperbolic(num_features)
    count = num_features // 2 if mirrored else num_features
    noise = torch.stack([gaussian_rows(count, head_dim, coupling, generator) for _ in range(heads)])
    noise = torch.cat([noise, -noise], dim=1) if mirrored else noise
    rows, log_weight = noise, torch.zeros_like(noise[..., 0])
    if proposal is not None:
        mean, root = (t.to("cpu", torch.float64) for t in proposal)
        rows = mean[:, None] + noise @ root.mT
        log_weight = log_density_ratio(rows, noise, root)
    device = torch.get_default_device()
    return Rows(rows.float().to(device), log_weight.float().to(device))


def draw_feature_map(
    head_dim: int,
    num_features: int = 256,
    *,
    estimator: str = "positive",
    coupling: str = "orthogonal",
    num_heads: int | None = None,
    seed: int = 0,
    proposal: Proposal | None = None,
) -> FeatureMap:
    """A random `FeatureMap` for `subquad.functional.favor_attention`.

    Args:
        estimator: "positive" (FAVOR+) or "hyperbolic" (every row with both signs).
        proposal: what rows are drawn from, with one mean and root per head; None for N(0, I).

    Example:
        >>> draw_feature_map(head_dim=8, num_features=32).query.shape
        torch.Size([1, 32, 8])
    """
    checks.choice("favor", "estimator", estimator, ("positive", "hyperbolic"))
    if proposal is not None:
        checks.proposal(proposal, num_heads or 1, head_dim, estimator)
    drawn = draw_rows(
        head_dim,
        num_features,
        coupling=coupling,
        num_heads=num_heads,
        seed=seed,
        mirrored=estimator == "hyperbolic",
        proposal=proposal,
    )
    return positive_map(drawn.weight, None if proposal is None else drawn.log_weight)
