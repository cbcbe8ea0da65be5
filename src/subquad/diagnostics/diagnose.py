"""Is a head's attention something that random features can do?"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from subquad.calibration.fitting import Settings, fitted_attention
from subquad.calibration.heads import Batch, Heads, Layer, collect
from subquad.calibration.progress import Tell, counting, telling
from subquad.checks import calibration as calibration_checks
from subquad.checks import diagnostics as checks
from subquad.diagnostics.diagnosis import Diagnosis, HeadDiagnosis, LayerDiagnosis
from subquad.diagnostics.probes import Fidelity, anatomy, fidelity
from subquad.diagnostics.verdicts import CALIBRATE, FINE, SHARP, good, helps, settled
from subquad.features.drawn import PLAIN
from subquad.features.draws import derived_seed
from subquad.mechanisms.favor import FavorAttention

FIT_ROWS = 256  # queries per batch that a calibrated draw is fitted to, as in `calibrate`


class _Settings(NamedTuple):
    rows: int
    tolerance: float
    seed: int
    num_features: int = 256
    near: int = 64
    sinks: int = 4
    estimator: str = "positive"

    def features_for(self, head_dim: int, **options: Any) -> FavorAttention:
        """For a layer that has none of its own."""
        chosen = {"near": self.near, "sinks": self.sinks, **options}
        return FavorAttention(head_dim, self.num_features, estimator=self.estimator, **chosen)


def diagnose(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    rows: int = 64,
    tolerance: float = 0.3,
    num_features: int | None = None,
    near: int | None = None,
    sinks: int | None = None,
    estimator: str | None = None,
    seed: int = 0,
    progress: bool | Tell = True,
) -> Diagnosis:
    """Measures, for every layer and head, how well FAVOR does what exact attention would.

    A FAVOR layer of ours is judged as it is, on what it is really asked. A softmax layer of ours, and every layer of a
    Hugging Face model, is judged as if FAVOR stood in its place, with the options below. The model stays as it is.

    A head is "fine" if its error is at most `tolerance`, and at most 1.25 times the larger of the errors of both
    baselines or a third of `tolerance`, whichever is more. Otherwise a calibrated draw of as many features is fitted
    to half of the sequences and measured on the other half: the head "needs calibration" if that is fine, or if 1.25
    times its error is still below both baselines and the present error. Otherwise, and without a trial if the
    layer's features are calibrated or learned already, it is "too sharp for random features: keep exact or learn".

    Args:
        model: any module with favor or softmax attention of ours, or a Hugging Face model whose attention goes through
            the attention interface of transformers.
        batches: what the model takes: tensors, mappings (called as `model(**batch)`) or tuples (`model(*batch)`).
        rows: queries of each sequence whose exact attention is computed.
        tolerance: relative error of a head's output that is good enough.
        num_features, near, sinks, estimator: of the features that exact layers are judged with: 256, 64, 4 and
            "positive" unless given; "hyperbolic" and "trigonometric" are the other estimators. Not for models whose
            layers are all FAVOR.
        seed: of the rows, of the features of exact layers, and of the calibrated draws.
        progress: True shows a bar if stderr is a terminal and rich is installed; a function is told what is done, how
            much of it, and of how much.

    Example:
        >>> from subquad import FavorAttention
        >>> layer = FavorAttention(head_dim=8, near=0, sinks=0)
        >>> found = diagnose(layer, [tuple(0.5 * torch.randn(3, 2, 4, 50, 8))])
        >>> [head.verdict for head in found.layers[0].heads]
        ['fine', 'fine', 'fine', 'fine']
    """
    options = {"num_features": num_features, "near": near, "sinks": sinks, "estimator": estimator}
    given_options = {name: value for name, value in options.items() if value is not None}
    settings = _Settings(rows, tolerance, seed, **given_options)
    checks.diagnose_settings(settings, PLAIN)
    settings.features_for(8)  # complains before the model runs
    given = list(calibration_checks.batches("diagnose", batches))
    with telling(progress) as tell:
        counter = counting(tell, "running the model", len(given))
        layers = collect(model, given, op="diagnose", exact=False, progress=counter)
        checks.options_are_used([layer.mechanism for layer in layers], FavorAttention, given_options)
        found = []
        for number, layer in enumerate(layers):
            tell(f"measuring {layer.name}", number, len(layers))
            found.append(_diagnose_layer(layer, settings, number))
    return Diagnosis(tolerance, rows, sum(len(heads.q) for heads in layers[0].heads), tuple(found))


def _diagnose_layer(layer: Layer, settings: _Settings, number: int) -> LayerDiagnosis:
    own = isinstance(layer.mechanism, FavorAttention)
    mechanism = layer.mechanism if isinstance(layer.mechanism, FavorAttention) else _stand_in(layer, settings, number)
    found = fidelity(mechanism, layer.heads, rows=settings.rows, seed=settings.seed)
    parts = anatomy(mechanism, layer.heads, rows=settings.rows, seed=settings.seed)
    fine = [good(error, _baselines(found, h), settings.tolerance) for h, error in enumerate(found.error.tolist())]
    trial = None if all(fine) or settled(mechanism) else _trial(mechanism, layer.heads, settings, number)
    heads = []
    for h, is_fine in enumerate(fine):
        helped = trial is not None and trial.helps(h, settings.tolerance)
        heads.append(
            HeadDiagnosis(
                query_norm=float(parts.query_norm[h]),
                key_norm=float(parts.key_norm[h]),
                logit_min=float(parts.logit_min[h]),
                logit_max=float(parts.logit_max[h]),
                entropy=float(parts.entropy[h]),
                error=float(found.error[h]),
                uniform_error=float(found.uniform[h]),
                near_error=None if found.near is None else float(found.near[h]),
                effective_features=_number(None if parts.effective_features is None else parts.effective_features[h]),
                calibrated_error=None if trial is None else float(trial.calibrated.error[h]),
                verdict=FINE if is_fine else CALIBRATE if helped else SHARP,
            )
        )
    options = mechanism.options
    kind = (mechanism.estimator, mechanism.num_features, options.near, options.sinks)
    return LayerDiagnosis(layer.name, own, *kind, settled(mechanism), tuple(heads))


def _number(x: torch.Tensor | None) -> float | None:
    """None for what does not exist, in a file too."""
    return None if x is None or bool(x.isnan()) else float(x)


def _baselines(found: Fidelity, head: int) -> list[float]:
    return [float(errors[head]) for errors in (found.uniform, found.near) if errors is not None]


def _stand_in(layer: Layer, settings: _Settings, number: int) -> FavorAttention:
    """What would replace the exact attention of a layer."""
    heads = layer.heads[0]
    crossed = any(h.q.shape[2] != h.k.shape[2] for h in layer.heads)
    options = {"scale": heads.scale, "num_heads": heads.k.shape[1], "seed": derived_seed(settings.seed, number)}
    if crossed:
        options["near"] = 0
    return settings.features_for(heads.q.shape[-1], **options).to(heads.q.device)


class _Trial(NamedTuple):
    """Errors on sequences that took no part in the fit, of the present features and of a calibrated draw."""

    present: Fidelity
    calibrated: Fidelity

    def helps(self, head: int, tolerance: float) -> bool:
        error, present = float(self.calibrated.error[head]), float(self.present.error[head])
        return helps(error, present, _baselines(self.present, head), tolerance)


def _trial(mechanism: FavorAttention, batches: Sequence[Heads], settings: _Settings, number: int) -> _Trial | None:
    """None where no sequence is long enough to have a far field."""
    fit, measure = _halves(mechanism, batches)
    if not fit:
        return None
    how = Settings("calibrated", None, 1, settings.tolerance, 1, FIT_ROWS, None, settings.seed)
    with torch.no_grad():
        fitted = fitted_attention(mechanism, fit, how, mechanism.num_features, derived_seed(settings.seed, number, 1))
    sample = {"rows": settings.rows, "seed": derived_seed(settings.seed, 1)}
    return _Trial(fidelity(mechanism, measure, **sample), fidelity(fitted, measure, **sample))


def _halves(mechanism: FavorAttention, batches: Sequence[Heads]) -> tuple[list[Heads], list[Heads]]:
    """Every other sequence that has a far field; one alone is in both halves."""
    options, halves = mechanism.options, ([], [])
    found = []
    for number, heads in enumerate(batches):
        exact = calibration_checks.all_exact(options.near, options.sinks, heads.causal)
        lengths = [heads.k.shape[2]] * len(heads.k) if heads.key_mask is None else heads.key_mask.sum(-1).tolist()
        found += [(number, index) for index, length in enumerate(lengths) if length > exact]
    for half, places in zip(halves, (found[::2], found[1::2] or found), strict=True):
        for number, heads in enumerate(batches):
            index = [i for n, i in places if n == number]
            if index:
                half.append(heads.sequences(torch.tensor(index, device=heads.q.device)))
    return halves
