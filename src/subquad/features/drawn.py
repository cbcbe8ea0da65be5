"""Random features of a layer: drawn rows, and what they are drawn from."""

import torch
from torch import Tensor

from subquad.features import proposals
from subquad.features.buffers import LayerFeatures
from subquad.features.positive import FeatureMap, draw_rows, positive_map, positive_map_of_step
from subquad.features.proposals import Proposal

PLAIN = ("positive", "hyperbolic", "trigonometric")  # rows are N(0, I)
FITTED = ("optimal", "sharp", "calibrated")  # rows come from a proposal made for the data
DRAWN = (*PLAIN, *FITTED)


class DrawnFeatures(LayerFeatures):
    """Buffers: `weight` `[heads or 1, M, D]`; for fitted estimators also `log_weight` `[.., M]` and the proposal's
    `mean` `[.., D]` and `root` `[.., D, D]`; with `transform`, T and its inverse transpose `[.., D, D]`.

    T is applied to queries and its inverse transpose to keys before anything else, which leaves q.k as it is.
    """

    weight: Tensor
    log_weight: Tensor | None
    mean: Tensor | None
    root: Tensor | None
    query_transform: Tensor | None
    key_transform: Tensor | None

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        estimator: str,
        coupling: str,
        num_heads: int | None,
        scale: float,
        seed: int,
        transform: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.num_features, self.num_heads = head_dim, num_features, num_heads
        self.estimator, self.coupling, self.scale, self.seed = estimator, coupling, scale, seed
        fitted = estimator in FITTED
        prior = proposals.prior(num_heads or 1, head_dim, scale) if fitted else None
        weight, log_weight = self._draw(seed, prior)
        self.register_buffer("weight", weight)
        self.register_buffer("log_weight", log_weight if fitted else None)
        for name, x in zip(("mean", "root"), prior or (None, None), strict=True):
            self.register_buffer(name, None if x is None else x.to(weight))
        for name in ("query_transform", "key_transform"):
            eye = torch.eye(head_dim, dtype=weight.dtype, device=weight.device).repeat(num_heads or 1, 1, 1)
            self.register_buffer(name, eye if transform else None)

    @property
    def feature_map(self) -> FeatureMap:
        return positive_map(self.weight, self.log_weight)

    def feature_map_for(self, dtype: torch.dtype) -> FeatureMap:
        return positive_map(self.weight, self.log_weight, dtype)

    def feature_map_of_step(self, dtype: torch.dtype) -> FeatureMap:
        weight, log_weight = self._buffers["weight"], self._buffers["log_weight"]  # attributes of modules are slow
        if weight is None or log_weight is not None or not weight.is_cpu:
            return self.feature_map_for(dtype)
        return positive_map_of_step(weight)

    @property
    def proposal(self) -> Proposal | None:
        return None if self.mean is None or self.root is None else Proposal(self.mean, self.root)

    def redraw(self, seed: int) -> None:
        """Fresh rows of the same proposal, in place."""
        weight, log_weight = self._draw(seed, self.proposal)
        self.weight.copy_(weight)
        if self.log_weight is not None:
            self.log_weight.copy_(log_weight)

    def fit(self, proposal: Proposal, seed: int) -> None:
        """Another proposal, and rows drawn from it, in place."""
        assert self.mean is not None
        assert self.root is not None
        self.mean.copy_(proposal.mean)
        self.root.copy_(proposal.root)
        self.redraw(seed)

    def reset_parameters(self) -> None:
        """As constructed: the prior, and the rows of the seed."""
        if self.mean is None:
            return self.redraw(self.seed)
        for transform in (self.query_transform, self.key_transform):
            if transform is not None:
                transform.copy_(torch.eye(self.head_dim))
        return self.fit(proposals.prior(self.num_heads or 1, self.head_dim, self.scale), self.seed)

    def _draw(self, seed: int, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        return draw_rows(
            self.head_dim,
            self.num_features,
            coupling=self.coupling,
            num_heads=self.num_heads,
            seed=seed,
            mirrored=self.estimator == "hyperbolic",
            proposal=proposal,
        )
