"""Is a head's attention something that random features can do?"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from subquad.calibration.fitted import drawn_attention
from subquad.checks import diagnostics as checks
from subquad.checks.calibration import all_exact
from subquad.diagnostics.diagnosis import Diagnosis, HeadDiagnosis, LayerDiagnosis
from subquad.diagnostics.far_field import far_share, loss_without, mean_loss
from subquad.diagnostics.probes import anatomy
from subquad.diagnostics.verdicts import CALIBRATE, FINE, SHARP, good, helps, settled
from subquad.features.drawn import PLAIN
from subquad.features.draws import derived_seed
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.fidelity import Fidelity, sampled_fidelity
from subquad.recording.progress import Tell, telling
from subquad.recording.record import LayerCalls, Recording
from subquad.recording.stream import Batch

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

    Of a FAVOR layer of ours it also says what its far field is worth: how much its output changes without, and the
    loss, if batches have labels or the model predicts the next token.

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
        progress: True shows a bar if stderr is a terminal and rich is installed; a function is called with what is
            done, how much of it, and of how much.

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
    with telling(progress) as tell:
        recording = Recording(model, batches, op="diagnose", exact=False, tell=tell)
        checks.options_are_used([layer.mechanism for layer in recording.layers], FavorAttention, given_options)
        found, sequences, usual = [], 0, None
        for number, layer in enumerate(recording):
            tell(f"measuring {layer.name}", number, len(recording))
            found.append(_diagnose_layer(layer, settings, number))
            own = layer.mechanism if isinstance(layer.mechanism, FavorAttention) else None
            if own is not None and (far := far_share(own, layer.calls)) is not None:
                usual = mean_loss(model, recording.batches) if usual is None else usual
                loss = loss_without(own, model, recording.batches, usual)
                found[-1] = replace(found[-1], far_share=far, far_loss=loss)
            sequences = sequences or sum(len(call.q) for call in layer.calls)  # of the first layer
    return Diagnosis(tolerance, rows, sequences, tuple(found))


def _diagnose_layer(layer: LayerCalls, settings: _Settings, number: int) -> LayerDiagnosis:
    own = isinstance(layer.mechanism, FavorAttention)
    mechanism = layer.mechanism if isinstance(layer.mechanism, FavorAttention) else _stand_in(layer, settings, number)
    found = sampled_fidelity(mechanism, layer.calls, rows=settings.rows, seed=settings.seed)
    parts = anatomy(mechanism, layer.calls, rows=settings.rows, seed=settings.seed)
    fine = [good(error, _baselines(found, h), settings.tolerance) for h, error in enumerate(found.error.tolist())]
    trial = None if all(fine) or settled(mechanism) else _trial(mechanism, layer.calls, settings, number)
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


def _stand_in(layer: LayerCalls, settings: _Settings, number: int) -> FavorAttention:
    """What would replace the exact attention of a layer."""
    call = layer.calls[0]
    crossed = any(c.q.shape[2] != c.k.shape[2] for c in layer.calls)
    options = {"scale": call.scale, "num_heads": call.k.shape[1], "seed": derived_seed(settings.seed, number)}
    if crossed:
        options["near"] = 0
    return settings.features_for(call.q.shape[-1], **options).to(call.q.device)


class _Trial(NamedTuple):
    """Errors on sequences that took no part in the fit, of the present features and of a calibrated draw."""

    present: Fidelity
    calibrated: Fidelity

    def helps(self, head: int, tolerance: float) -> bool:
        error, present = float(self.calibrated.error[head]), float(self.present.error[head])
        return helps(error, present, _baselines(self.present, head), tolerance)


def _trial(mechanism: FavorAttention, calls: Sequence[Call], settings: _Settings, number: int) -> _Trial | None:
    """None where no sequence is long enough to have a far field."""
    fit, measure = _halves(mechanism, calls)
    if not fit:
        return None
    seed = derived_seed(settings.seed, number, 1)
    with torch.no_grad():
        fitted = drawn_attention(mechanism, fit, "calibrated", mechanism.num_features, rows=FIT_ROWS, seed=seed)
    sample = {"rows": settings.rows, "seed": derived_seed(settings.seed, 1)}
    return _Trial(sampled_fidelity(mechanism, measure, **sample), sampled_fidelity(fitted, measure, **sample))


def _halves(mechanism: FavorAttention, calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Every other sequence that has a far field; one alone is in both halves."""
    options, halves = mechanism.options, ([], [])
    found = []
    for number, call in enumerate(calls):
        exact = all_exact(options, call.causal)
        lengths = [call.k.shape[2]] * len(call.k) if call.key_mask is None else call.key_mask.sum(-1).tolist()
        found += [(number, index) for index, length in enumerate(lengths) if length > exact]
    for half, places in zip(halves, (found[::2], found[1::2] or found), strict=True):
        for number, call in enumerate(calls):
            index = [i for n, i in places if n == number]
            if index:
                half.append(call.sequences(torch.tensor(index, device=call.q.device)))
    return halves
