"""FAVOR layers whose features are fitted to something, for the contract."""

import warnings
from typing import Any, TypeVar

import torch

from subquad import FavorAttention
from subquad.errors import UncalibratedWarning
from subquad.features import Proposal
from subquad.features.drawn import DrawnFeatures
from subquad.features.learned import LEARNED

Favor = TypeVar("Favor", bound=FavorAttention)


def some_proposal(heads: int, dim: int, seed: int = 0) -> Proposal:
    """Off the origin, wider than N(0, I), longer in some directions than in others."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.5 * torch.randn(heads, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    return Proposal(mean, torch.eye(dim, dtype=torch.float64) + 0.1 * noise @ noise.mT / dim**0.5)


def brief(estimator: str, steps: int = 2) -> dict[str, Any]:
    """Options of `calibrate`: an estimator, and few steps if it is trained."""
    return {"estimator": estimator, "steps": steps} if estimator in LEARNED else {"estimator": estimator}


def fitted(kind: type[Favor], head_dim: int, num_features: int, *, estimator: str, **options: Any) -> Favor:
    """A layer of the class `kind`, with features as calibration might leave them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedWarning)
        attention = kind(head_dim, num_features, estimator=estimator, **options)
    generator = torch.Generator().manual_seed(1)
    if estimator in LEARNED:
        for parameter in attention.features.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return attention
    features = attention.features
    assert isinstance(features, DrawnFeatures)
    heads = len(features.weight)
    features.fit(some_proposal(heads, head_dim), seed=0)
    if features.query_transform is not None and features.key_transform is not None:
        turn = some_proposal(heads, head_dim, seed=1).root
        features.query_transform.copy_(turn)
        features.key_transform.copy_(torch.linalg.inv(turn).mT)
    return attention
