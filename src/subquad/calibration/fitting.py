"""Features fitted to the queries and keys a model really has."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from subquad.calibration.choice import best_fit
from subquad.calibration.errors import head_errors
from subquad.calibration.heads import Batch, Heads, Layer, collect
from subquad.calibration.moments import fitted_proposal, weighted_moments
from subquad.calibration.progress import Tell, counting, telling
from subquad.calibration.report import CalibrationReport, LayerReport
from subquad.calibration.training import start_features, train_features
from subquad.checks import calibration as checks
from subquad.features.drawn import FITTED, DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.features.learned import LEARNED
from subquad.mechanisms.favor import FavorAttention

SMALLEST, MARGIN, DRAWS = 32, 1.7, 2  # of num_features="auto": where it begins, how much better than asked, draws
DEFAULTS: dict[str, Any] = {"steps": 200, "target": 0.3, "cap": 1024}
HELD_OUT = 5  # every fifth batch is kept for measuring


class Settings(NamedTuple):
    """What `calibrate` was asked for."""

    estimator: str
    num_features: int | Literal["auto"] | None
    steps: int
    target: float
    cap: int
    rows: int
    transform: bool | None
    seed: int


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    estimator: str = "calibrated",
    num_features: int | Literal["auto"] | None = None,
    steps: int | None = None,
    target: float | None = None,
    cap: int | None = None,
    rows: int = 256,
    transform: bool | None = None,
    seed: int = 0,
    progress: bool | Tell = True,
) -> CalibrationReport:
    """Fits the features of every FAVOR layer to data, in place; nothing changes if it fails.

    The model runs once over the batches with exact attention, and each layer is fitted to what it was asked. Every
    fifth batch is held out and measures the errors in the report; with one batch, that batch does.

    Args:
        model: any module with `FavorAttention` in it, or one alone. Its weights stay as they are.
        batches: what the model takes: tensors, mappings (called as `model(**batch)`) or tuples (`model(*batch)`).
            A few thousand tokens do; all that the layers are asked is kept in memory.
        estimator: "calibrated", "optimal" or "sharp" (drawn), "softmax" or "exponential" (learned, better, slower).
        num_features: per layer; None keeps what a layer has. "auto" doubles it until the mean error of the layer's
            heads is `target / 1.7` (two draws), and raises CalibrationError where `cap` features are not enough.
        steps: of training learned features, per layer; 200 unless given.
        target, cap: for num_features="auto" only; 0.3 and 1,024 unless given.
        rows: queries per batch whose exact attention weighs the statistics.
        transform: calibrated only: also balance queries and keys, which leaves q.k as it is, costs a small product per
            token and is worth it on all models that were measured; None: yes, unless the kernel is Gaussian.
        progress: True shows a bar if stderr is a terminal and rich is installed; a function is told what is done, how
            much of it, and of how much.

    Example:
        >>> from subquad import FavorAttention
        >>> layer = FavorAttention(head_dim=8, num_features=32, near=0, sinks=0)
        >>> report = calibrate(layer, [tuple(torch.randn(3, 1, 2, 50, 8))])
        >>> layer.estimator, len(report.layers[0].after)
        ('calibrated', 2)
    """
    checks.choice("calibrate", "estimator", estimator, (*FITTED, *LEARNED))
    checks.used(estimator in LEARNED, num_features == "auto", steps=steps, target=target, cap=cap)
    chosen = {"steps": steps, "target": target, "cap": cap}
    chosen = DEFAULTS | {name: value for name, value in chosen.items() if value is not None}
    settings = Settings(estimator, num_features, rows=rows, transform=transform, seed=seed, **chosen)
    checks.settings(settings)
    given = list(checks.batches("calibrate", batches))
    with telling(progress) as tell:
        layers, fitted, reports = _fit(model, given, settings, tell)
    checks.reached(settings, reports)
    for layer, mechanism in zip(layers, fitted, strict=True):
        cast(FavorAttention, layer.mechanism).adopt_features(mechanism)
    _note_in_config(model)
    return CalibrationReport(estimator, len(given) > 1, tuple(reports))


def _fit(
    model: nn.Module, batches: list[Batch], settings: Settings, tell: Tell
) -> tuple[list[Layer], list[FavorAttention], list[LayerReport]]:
    """The FAVOR layers, what they should become, and how good that is."""
    progress = counting(tell, "running the model", len(batches))
    layers = collect(model, batches, op="calibrate", exact=True, progress=progress)
    layers = [layer for layer in layers if isinstance(layer.mechanism, FavorAttention)]
    checks.favor_layers(model, len(layers))
    fitted, reports = [], []
    for number, layer in enumerate(layers):
        tell(f"fitting {layer.name}", number, len(layers))
        mechanism, report = _fit_layer(layer, settings, derived_seed(settings.seed, number))
        fitted.append(mechanism)
        reports.append(report)
    tell("done", len(layers), len(layers))
    return layers, fitted, reports


def split(batches: Sequence[Heads]) -> tuple[list[Heads], list[Heads]]:
    """Those to fit, and those to measure."""
    if len(batches) == 1:
        return list(batches), list(batches)
    kept = [heads for i, heads in enumerate(batches) if i % HELD_OUT != HELD_OUT - 1 and i != len(batches) - 1]
    held = [heads for i, heads in enumerate(batches) if i % HELD_OUT == HELD_OUT - 1 or i == len(batches) - 1]
    return kept, held


def _fit_layer(layer: Layer, settings: Settings, seed: int) -> tuple[FavorAttention, LayerReport]:
    mechanism = cast(FavorAttention, layer.mechanism)
    fit, measure = split(layer.heads)
    before = head_errors(mechanism, measure)
    if settings.num_features == "auto":
        fitted, after = _smallest(mechanism, fit, measure, settings, seed)
    else:
        fitted = fitted_attention(mechanism, fit, settings, settings.num_features or mechanism.num_features, seed)
        after = head_errors(fitted, measure)
    return fitted, LayerReport(layer.name, fitted.num_features, tuple(before.tolist()), tuple(after.tolist()))


def _smallest(
    mechanism: FavorAttention, fit: list[Heads], measure: list[Heads], settings: Settings, seed: int
) -> tuple[FavorAttention, Tensor]:
    """The fewest features whose measured error is below the target with a margin; else the most allowed."""
    num_features = min(SMALLEST, settings.cap)
    while True:
        fitted = fitted_attention(mechanism, fit, settings, num_features, seed)
        errors = [head_errors(fitted, measure)]
        if isinstance(fitted.features, DrawnFeatures):
            for draw in range(1, DRAWS):
                other = copy.deepcopy(fitted)
                other.redraw(derived_seed(seed, draw))
                errors.append(head_errors(other, measure))
        if torch.stack(errors).mean() <= settings.target / MARGIN or num_features >= settings.cap:
            return fitted, torch.stack(errors).mean(0)
        num_features = min(2 * num_features, settings.cap)


def fitted_attention(
    mechanism: FavorAttention, batches: Sequence[Heads], settings: Settings, num_features: int, seed: int
) -> FavorAttention:
    """A copy of `mechanism` with features fitted to the batches, in float32 or better."""
    batches = [heads.precise() for heads in batches]
    fitted = copy.deepcopy(mechanism)
    transform = settings.transform
    if transform is None:
        transform = settings.estimator == "calibrated" and not mechanism.options.gaussian
    fitted.set_features(settings.estimator, num_features, mechanism.num_heads, transform=transform)
    fitted.to(batches[0].q.device)
    checks.far_pairs(fitted, batches)
    if settings.estimator in LEARNED:
        start_features(fitted, batches, rows=settings.rows, seed=seed)
        train_features(fitted, batches, steps=settings.steps, seed=seed)
        return fitted
    features = cast(DrawnFeatures, fitted.features)
    sample = {"rows": settings.rows, "seed": seed, "alike": settings.estimator != "calibrated"}
    moments = weighted_moments(fitted, batches, len(features.weight), **sample)
    if settings.estimator == "calibrated":
        best_fit(fitted, batches, moments, seed=seed).apply(features, seed)
    else:
        features.fit(fitted_proposal(settings.estimator, moments), seed)
    return fitted


def _note_in_config(model: Any) -> None:
    """A saved model of ours must come back with the features it has now."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "model_type", "") != "subquad":
        return
    names, options = [], []
    for layer, mechanism in enumerate(model.mechanisms()):
        name, chosen = config.layer_attention(layer)
        if isinstance(mechanism, FavorAttention):
            chosen |= {"estimator": mechanism.estimator, "num_features": mechanism.num_features}
            chosen.pop("transform", None)
            chosen |= {"transform": True} if mechanism.transform else {}
        names.append(name)
        options.append(chosen)
    config.attention, config.attention_options = names, options
