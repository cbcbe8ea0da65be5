"""Positive feature maps of exp(x.y), as data: the engines know this form and nothing about where it came from.

With x = sqrt(scale) q and y = sqrt(scale) k,

    log phi_r(x) = Wq_r.x          + s(x)      + offset(x)
    log psi_r(y) = Wk_r.y + bias_r + s(y)

and exp(x.y) is estimated by sum_r phi_r(x) psi_r(y). `rule` names s: "none", "norm" (-|x|^2 / 2, all random
features), "groups" (minus the log-sum-exp within each of `groups` equal groups of features, learned maps).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad import checks
from subquad.features.draws import COUPLINGS, gaussian_rows

ESTIMATORS = ("positive", "hyperbolic")


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


def positive_map(weight: Tensor) -> FeatureMap:
    """The unbiased map whose rows are `weight` `[heads or 1, M, D]`, drawn by `draw_weight`."""
    heads, num_features, _ = weight.shape
    dtype = torch.float32 if weight.device.type == "mps" else torch.float64  # log M must not cost float64 its digits
    bias = weight.new_full((heads, num_features), -math.log(num_features), dtype=dtype)
    return FeatureMap(weight, weight, bias)


def draw_weight(
    head_dim: int, num_features: int, *, estimator: str, coupling: str, num_heads: int | None, seed: int
) -> Tensor:
    """Rows of a random feature map, `[num_heads or 1, num_features, head_dim]` float32; same seed, same bits.

    "positive" are the paper's FAVOR+ features; "hyperbolic" uses each row with both signs, which halves the draws.
    """
    checks.choice("favor", "estimator", estimator, ESTIMATORS)
    checks.choice("favor", "coupling", coupling, COUPLINGS)
    checks.count("favor", "head_dim", head_dim)
    checks.count("favor", "num_features", num_features)
    checks.optional_count("favor", "num_heads", num_heads)
    generator = torch.Generator("cpu").manual_seed(checks.seed("favor", seed))
    mirrored = estimator == "hyperbolic"
    if mirrored and num_features % 2:
        raise checks.odd_hyperbolic(num_features)
    rows = num_features // 2 if mirrored else num_features
    heads = [gaussian_rows(rows, head_dim, coupling, generator) for _ in range(num_heads or 1)]
    weight = torch.stack(heads)
    weight = torch.cat([weight, -weight], dim=1) if mirrored else weight
    return weight.float().to(torch.get_default_device())


def draw_feature_map(
    head_dim: int,
    num_features: int = 256,
    *,
    estimator: str = "positive",
    coupling: str = "orthogonal",
    num_heads: int | None = None,
    seed: int = 0,
) -> FeatureMap:
    """A random `FeatureMap` for `subquad.functional.favor_attention`.

    Example:
        >>> draw_feature_map(head_dim=8, num_features=32).query.shape
        torch.Size([1, 32, 8])
    """
    return positive_map(
        draw_weight(head_dim, num_features, estimator=estimator, coupling=coupling, num_heads=num_heads, seed=seed)
    )
