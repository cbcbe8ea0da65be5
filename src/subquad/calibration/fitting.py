"""Features fitted to the queries and keys a model really has."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from subquad.calibration.fitted import drawn_attention, learned_attention
from subquad.calibration.note import note_in_config
from subquad.calibration.report import CalibrationReport, LayerReport
from subquad.checks import calibration as checks
from subquad.checks.recording import can_be_recorded
from subquad.features.drawn import FITTED, DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.features.learned import LEARNED
from subquad.features.names import current_name
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.fidelity import ExactOutputs
from subquad.recording.layers import own_layers
from subquad.recording.progress import Tell, telling
from subquad.recording.record import LayerCalls, Recording
from subquad.recording.stream import COMPARABLE, Batch, is_favor

SMALLEST, MARGIN, DRAWS = 32, 1.7, 2  # of num_features="auto": where it begins, how much better than asked, draws
DEFAULTS: dict[str, Any] = {"steps": 200, "target": 0.3, "cap": 1024}
Some = TypeVar("Some")
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

    The model runs over the batches with exact attention, and each layer is fitted to what it was asked. Every
    fifth batch is held out and measures the errors in the report; with one batch, that batch does.

    Args:
        model: any module with `FavorAttention` in it, or one alone. Its weights stay as they are.
        batches: what the model takes: tensors, mappings (called as `model(**batch)`) or tuples (`model(*batch)`).
            A few thousand tokens do. What the layers are asked is kept in memory up to 2 GiB; where it is more, the
            model runs again for the layers that are left.
        estimator: "calibrated", "optimal" or "sharp" (drawn), "hedgehog" or "exponential" (learned, better, slower).
        num_features: per layer; None keeps what a layer has. "auto" doubles it until the mean error of the layer's
            heads is `target / 1.7` (two draws), and raises CalibrationError where `cap` features are not enough.
        steps: of training learned features, per layer; 200 unless given.
        target, cap: for num_features="auto" only; 0.3 and 1,024 unless given.
        rows: queries per batch whose exact attention weighs the statistics.
        transform: calibrated only: also balance queries and keys, which leaves q.k as it is, costs a small product per
            token and is worth it on all models that were measured; None: yes, unless the kernel is Gaussian.
        progress: True shows a bar if stderr is a terminal and rich is installed; a function is called with what is
            done, how much of it, and of how much.

    Example:
        >>> from subquad import FavorAttention
        >>> layer = FavorAttention(head_dim=8, num_features=32, near=0, sinks=0)
        >>> report = calibrate(layer, [tuple(torch.randn(3, 1, 2, 50, 8))])
        >>> layer.estimator, len(report.layers[0].after)
        ('calibrated', 2)
    """
    estimator = current_name(estimator)
    checks.choice("calibrate", "estimator", estimator, (*FITTED, *LEARNED))
    checks.used(estimator in LEARNED, num_features == "auto", steps=steps, target=target, cap=cap)
    chosen = {"steps": steps, "target": target, "cap": cap}
    chosen = DEFAULTS | {name: value for name, value in chosen.items() if value is not None}
    settings = Settings(
        estimator=estimator, num_features=num_features, rows=rows, transform=transform, seed=seed, **chosen
    )
    checks.settings(settings)
    _check_model(model)
    with telling(progress) as tell:
        recording = Recording(model, batches, op="calibrate", exact=True, wanted=is_favor, tell=tell)
        fitted, reports = _fit(recording, settings, tell)
    checks.reached(settings, reports)
    for layer, mechanism in zip(recording.layers, fitted, strict=True):
        cast(FavorAttention, layer.mechanism).adopt_features(mechanism)
    note_in_config(model)
    return CalibrationReport(estimator, len(recording.batches) > 1, tuple(reports))


def _check_model(model: nn.Module) -> None:
    """Complains before the model runs."""
    own = own_layers(model, COMPARABLE)
    if not own:
        can_be_recorded("calibrate", model)
    checks.favor_layers(model, sum(map(is_favor, own)))


def _fit(recording: Recording, settings: Settings, tell: Tell) -> tuple[list[FavorAttention], list[LayerReport]]:
    """What the layers should become, and how good that is."""
    fitted, reports = [], []
    for number, layer in enumerate(recording):
        tell(f"fitting {layer.name}", number, len(recording))
        mechanism, report = _fit_layer(layer, settings, derived_seed(settings.seed, number))
        fitted.append(mechanism)
        reports.append(report)
    tell("done", len(recording), len(recording))
    return fitted, reports


def split(calls: Sequence[Some]) -> tuple[list[Some], list[Some]]:
    """Those to fit, and those to measure; of calls, or of all calls of a batch."""
    if len(calls) == 1:
        return list(calls), list(calls)
    kept = [call for i, call in enumerate(calls) if i % HELD_OUT != HELD_OUT - 1 and i != len(calls) - 1]
    held = [call for i, call in enumerate(calls) if i % HELD_OUT == HELD_OUT - 1 or i == len(calls) - 1]
    return kept, held


def _fit_layer(layer: LayerCalls, settings: Settings, seed: int) -> tuple[FavorAttention, LayerReport]:
    mechanism = cast(FavorAttention, layer.mechanism)
    fit, held = split(layer.calls)
    measure = ExactOutputs(held)
    before = measure.errors(mechanism)
    if settings.num_features == "auto":
        fitted, after = _smallest(mechanism, fit, measure, settings, seed)
    else:
        fitted = _fitted(mechanism, fit, settings, settings.num_features or mechanism.num_features, seed)
        after = measure.errors(fitted)
    return fitted, LayerReport(layer.name, fitted.num_features, tuple(before.tolist()), tuple(after.tolist()))


def _fitted(
    mechanism: FavorAttention, calls: list[Call], settings: Settings, num_features: int, seed: int
) -> FavorAttention:
    s = settings
    if s.estimator in LEARNED:
        return learned_attention(mechanism, calls, s.estimator, num_features, steps=s.steps, rows=s.rows, seed=seed)
    how = {"rows": s.rows, "seed": seed, "transform": s.transform}
    return drawn_attention(mechanism, calls, s.estimator, num_features, **how)


def _smallest(
    mechanism: FavorAttention, fit: list[Call], measure: ExactOutputs, settings: Settings, seed: int
) -> tuple[FavorAttention, Tensor]:
    """The fewest features whose measured error is below the target with a margin; else the most allowed."""
    num_features = min(SMALLEST, settings.cap)
    while True:
        fitted = _fitted(mechanism, fit, settings, num_features, seed)
        errors = [measure.errors(fitted)]
        if isinstance(fitted.features, DrawnFeatures):
            for draw in range(1, DRAWS):
                other = copy.deepcopy(fitted)
                other.redraw(derived_seed(seed, draw))
                errors.append(measure.errors(other))
        if torch.stack(errors).mean() <= settings.target / MARGIN or num_features >= settings.cap:
            return fitted, torch.stack(errors).mean(0)
        num_features = min(2 * num_features, settings.cap)
