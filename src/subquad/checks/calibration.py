"""Checks of `subquad.calibrate`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.checks import choice as choice
from subquad.checks import count, seed
from subquad.errors import CalibrationError, ConfigError


def used(learned: bool, auto: bool, **given: Any) -> None:
    """Nothing that is given is ignored."""
    if given.pop("steps") is not None and not learned:
        raise ConfigError(
            "calibrate: steps is for learned features, estimator='hedgehog' or 'exponential'; leave it out"
        )
    for name, value in given.items():
        if value is not None and not auto:
            raise ConfigError(f"calibrate: {name} is for num_features='auto'; leave it out")


def settings(given: Any) -> None:
    op = "calibrate"
    seed(op, given.seed)
    if given.num_features is not None and given.num_features != "auto":
        count(op, "num_features", given.num_features)
    for name in ("steps", "cap", "rows"):
        count(op, name, getattr(given, name))
    if isinstance(given.target, bool) or not isinstance(given.target, (int, float)) or not 0 < given.target < 1:
        raise ConfigError(f"{op}: target must lie between 0 and 1, got {given.target!r}")
    if given.transform and given.estimator != "calibrated":
        raise ConfigError(f"{op}: transform=True needs estimator='calibrated', got {given.estimator!r}")
    if given.num_features == "auto" and given.estimator == "hedgehog" and given.cap % 2:
        raise ConfigError(f"{op}: estimator='hedgehog' has an even number of features, got cap={given.cap}")


def favor_layers(model: Any, layers: int) -> None:
    if not layers:
        raise ConfigError(f"calibrate: {type(model).__name__} has no FavorAttention; there is nothing to calibrate")


def far_pairs(mechanism: Any, heads: Sequence[Any]) -> None:
    """Some query must have keys that are left to the features."""
    near, reach, sinks = mechanism.options.near, mechanism.options.reach, mechanism.options.sinks
    if not mechanism.options.far:
        raise ConfigError(
            "calibrate: far=False has no far field, and features that nothing reads; set far = True first"
        )
    longest = max(h.k.shape[2] if h.key_mask is None else int(h.key_mask.sum(-1).max()) for h in heads)
    if longest <= all_exact(mechanism.options, heads[0].causal):
        blocks = f"near={near}" if reach == 1 else f"near={near}, reach={reach}"
        raise ConfigError(
            f"calibrate: with {blocks} and sinks={sinks} a sequence of {longest} tokens is all exact, "
            "there is nothing to estimate; give longer sequences"
        )


def some_far_rows(weight: Tensor, rows: int) -> None:
    """weight `[heads]`: of the far pairs of sampled rows, all pairs alike."""
    if not bool((weight > 0).all()):
        raise ConfigError(
            f"calibrate: rows={rows} queries were sampled of each batch, and none of them has a key far away; "
            "sample more, or give longer sequences"
        )


def finite(parameters: Sequence[Tensor]) -> None:
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise CalibrationError(
            "calibrate: training ended in non-finite features, and nothing was changed; are all queries, keys "
            "and values of the model finite?"
        )


def all_exact(options: Any, causal: bool) -> int:
    """Tokens of the longest sequence in which no pair is left to the features. options: of the mechanism."""
    near, reach, sinks = options.near, options.reach, options.sinks
    if not near:
        return sinks
    return (sinks // near + reach + 1) * near if causal else max((reach + 1) * near, sinks)


def reached(given: Any, reports: Sequence[Any]) -> None:
    if given.num_features != "auto":
        return
    failed = [report for report in reports if not report.mean_after <= given.target]
    if failed:
        worst = max(failed, key=lambda report: report.mean_after)
        raise CalibrationError(
            f"calibrate: {len(failed)} of {len(reports)} layers do not reach target={given.target} with up to "
            f"{given.cap} features of estimator={given.estimator!r}; worst is {worst.name} with {worst.mean_after:.3f} "
            f"(heads {min(worst.after):.3f} to {max(worst.after):.3f}). Nothing was changed. Keep exact attention in "
            "those layers, learn the features (estimator='hedgehog'), or choose num_features yourself: "
            + ", ".join(f"{report.name} {report.mean_after:.3f}" for report in failed)
        )
