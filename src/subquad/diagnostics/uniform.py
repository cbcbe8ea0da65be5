"""FAVOR layers that give a model no more than the mean of all values would."""

from typing import NamedTuple, cast

from torch import nn

from subquad.checks.calibration import all_exact
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.fidelity import sampled_fidelity
from subquad.recording.record import Recording
from subquad.recording.stream import Batch, is_favor

USELESS = 0.9  # of the error of the mean of all values
LARGE = 0.3  # smaller errors do no harm, as in a model that has not learned to look at anything yet


class Useless(NamedTuple):
    """A layer and its error, the mean of its heads, and that of the mean of all values."""

    name: str
    error: float
    uniform: float


def useless_layers(model: nn.Module, batch: Batch, *, rows: int) -> list[Useless]:
    """Layers with a far field whose output is about as far from exact attention as the mean of all values is."""
    if not any(isinstance(module, FavorAttention) for module in model.modules()):
        return []
    found = []
    for layer in Recording(model, [batch], op="diagnose", exact=False, wanted=is_favor):
        mechanism = cast(FavorAttention, layer.mechanism)
        options = mechanism.options
        if not options.far or all(call.k.shape[2] <= all_exact(options, call.causal) for call in layer.calls):
            continue
        errors = sampled_fidelity(mechanism, layer.calls, rows=rows, seed=0)
        error, uniform = float(errors.error.mean()), float(errors.uniform.mean())
        if error > LARGE and error >= USELESS * uniform:
            found.append(Useless(layer.name, error, uniform))
    return found
