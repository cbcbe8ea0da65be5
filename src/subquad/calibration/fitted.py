"""A FAVOR layer with features fitted to what it was given, drawn or learned."""

import copy
from collections.abc import Sequence

from subquad.calibration.choice import best_fit
from subquad.calibration.moments import fitted_proposal, weighted_moments
from subquad.calibration.training import start_features, train_features
from subquad.checks import calibration as checks
from subquad.features.drawn import DrawnFeatures
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call


def drawn_attention(
    mechanism: FavorAttention,
    calls: Sequence[Call],
    estimator: str,
    num_features: int,
    *,
    rows: int,
    seed: int,
    transform: bool | None = None,
) -> FavorAttention:
    """A copy of `mechanism` with "calibrated", "optimal" or "sharp" features.

    rows: queries of each call whose exact attention weighs the statistics. transform: "calibrated" only; None: yes,
    unless the kernel is Gaussian.
    """
    if transform is None:
        transform = estimator == "calibrated" and not mechanism.options.gaussian
    fitted, calls = _fresh(mechanism, calls, estimator, num_features, transform)
    features = fitted.features
    assert isinstance(features, DrawnFeatures)
    alike = estimator != "calibrated"
    moments = weighted_moments(fitted, calls, len(features.weight), rows=rows, seed=seed, alike=alike)
    if estimator == "calibrated":
        best_fit(fitted, calls, moments, seed=seed).apply(features, seed)
    else:
        features.fit(fitted_proposal(estimator, moments), seed)
    return fitted


def learned_attention(
    mechanism: FavorAttention,
    calls: Sequence[Call],
    estimator: str,
    num_features: int,
    *,
    steps: int,
    rows: int,
    seed: int,
) -> FavorAttention:
    """A copy of `mechanism` with features that are trained; rows: queries of each call that the start is fitted to."""
    fitted, calls = _fresh(mechanism, calls, estimator, num_features, transform=False)
    start_features(fitted, calls, rows=rows, seed=seed)
    train_features(fitted, calls, steps=steps, seed=seed)
    return fitted


def _fresh(
    mechanism: FavorAttention, calls: Sequence[Call], estimator: str, num_features: int, transform: bool
) -> tuple[FavorAttention, list[Call]]:
    """A copy with features that are not fitted yet, and the calls in float32 or better."""
    calls = [call.precise() for call in calls]
    fresh = copy.deepcopy(mechanism)
    fresh.set_features(estimator, num_features, mechanism.num_heads, transform=transform)
    fresh.to(calls[0].q.device)
    checks.far_pairs(fresh, calls)
    return fresh, calls
