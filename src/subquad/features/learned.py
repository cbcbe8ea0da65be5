"""Feature maps that are trained, by backpropagation through the model or by `subquad.calibrate`."""

import math

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.features.buffers import LayerFeatures
from subquad.features.draws import haar
from subquad.features.positive import FeatureMap, Rows, draw_rows

LEARNED = ("hedgehog", "exponential")
SHARPNESS = 2.0  # standard deviation of W x at the start: flat features learn slowly


class HedgehogFeatures(LayerFeatures):
    """`[softmax(W x), softmax(-W x)]` with a W for queries and one for keys (Zhang et al. 2024).

    Features sum to one instead of following exp(x.y), so against exact near keys they need an affine
    `offset(x)`, learned too. Without near keys it would cancel, and there is none.

    query, key `[heads or 1, M / 2, D]`; offset_weight `[.., D]`, offset_bias `[..]`.
    """

    def __init__(
        self, head_dim: int, num_features: int, *, num_heads: int | None, scale: float, seed: int, offset: bool
    ) -> None:
        super().__init__()
        if num_features % 2:
            raise checks.odd_hedgehog(num_features)
        heads = num_heads or 1
        self.head_dim, self.num_features, self.scale, self.seed = head_dim, num_features, scale, seed
        self.query = nn.Parameter(torch.empty(heads, num_features // 2, head_dim))
        self.key = nn.Parameter(torch.empty_like(self.query))
        self.offset_weight = nn.Parameter(torch.zeros(heads, head_dim)) if offset else None
        self.offset_bias = nn.Parameter(torch.zeros(heads)) if offset else None
        self.reset_parameters()

    @property
    def feature_map(self) -> FeatureMap:
        query, key = (torch.cat([w, -w], dim=1) for w in (self.query, self.key))
        bias = key.new_zeros(key.shape[:2])
        return FeatureMap(query, key, bias, "groups", 2, self.offset_weight, self.offset_bias)

    def reset_parameters(self) -> None:
        """Sharp and rotated, for q, k ~ N(0, I)."""
        size = self.query.new_full((len(self.query),), self.scale**0.5)
        self.start(size, size, self.seed)
        if self.offset_weight is not None and self.offset_bias is not None:
            nn.init.zeros_(self.offset_weight)
            nn.init.zeros_(self.offset_bias)

    @torch.no_grad()
    def start(self, x_rms: Tensor, y_rms: Tensor, seed: int) -> None:
        """One random rotation for both maps, such that W x has the deviation SHARPNESS. x_rms, y_rms `[heads]`."""
        generator = torch.Generator("cpu").manual_seed(checks.seed("favor", seed))
        heads, rows, dim = self.query.shape
        blocks = -(-rows // dim)
        turned = [torch.cat([haar(dim, generator) for _ in range(blocks)])[:rows] for _ in range(heads)]
        rotation = SHARPNESS * torch.stack(turned).to(self.query)
        self.query.copy_(rotation / x_rms.to(rotation)[:, None, None])
        self.key.copy_(rotation / y_rms.to(rotation)[:, None, None])


class ExponentialFeatures(LayerFeatures):
    """`exp(W x - |x|^2 / 2)`, and a weight for each feature: random features whose rows are trained.

    query, key `[heads or 1, M, D]`, log_weight `[.., M]`.
    """

    def __init__(self, head_dim: int, num_features: int, *, coupling: str, num_heads: int | None, seed: int) -> None:
        super().__init__()
        heads = num_heads or 1
        self.head_dim, self.num_features, self.coupling, self.seed = head_dim, num_features, coupling, seed
        self.query = nn.Parameter(torch.empty(heads, num_features, head_dim))
        self.key = nn.Parameter(torch.empty_like(self.query))
        self.log_weight = nn.Parameter(torch.empty(heads, num_features))
        self.reset_parameters()

    @property
    def feature_map(self) -> FeatureMap:
        return FeatureMap(self.query, self.key, self.log_weight - math.log(self.num_features))

    def reset_parameters(self) -> None:
        """FAVOR+."""
        heads, features, dim = self.query.shape
        options = {"coupling": self.coupling, "num_heads": heads, "seed": self.seed}
        self.start(draw_rows(dim, features, **options))

    @torch.no_grad()
    def start(self, rows: Rows) -> None:
        """From drawn rows."""
        self.query.copy_(rows.weight)
        self.key.copy_(rows.weight)
        self.log_weight.copy_(rows.log_weight)


def learned_features(
    estimator: str,
    head_dim: int,
    num_features: int,
    *,
    coupling: str,
    num_heads: int | None,
    scale: float,
    seed: int,
    offset: bool,
) -> HedgehogFeatures | ExponentialFeatures:
    """The learned map called `estimator`."""
    if estimator == "hedgehog":
        return HedgehogFeatures(head_dim, num_features, num_heads=num_heads, scale=scale, seed=seed, offset=offset)
    return ExponentialFeatures(head_dim, num_features, coupling=coupling, num_heads=num_heads, seed=seed)
