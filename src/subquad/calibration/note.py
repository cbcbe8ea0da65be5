"""Calibrated features in the config of a model, so that a saved one comes back with the features it has now."""

from typing import Any, Protocol, runtime_checkable

from torch import nn

from subquad.mechanism import Mechanism, outermost
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention


@runtime_checkable
class LayerOptions(Protocol):
    """A config that says which mechanism each layer has: `subquad.models.SubquadConfig` does."""

    attention: Any
    attention_options: Any

    def layer_attention(self, layer: int) -> tuple[str, dict[str, Any]]:
        """The name of a layer's mechanism and its options."""
        ...


def note_in_config(model: nn.Module) -> None:
    """Writes the estimators and numbers of features of all FAVOR layers into the config, if it has a place for them."""
    config = getattr(model, "config", None)
    if not isinstance(config, LayerOptions):
        return
    names, options = [], []
    for layer, (_, mechanism) in enumerate(outermost(model)):
        name, chosen = config.layer_attention(layer)
        names.append(name)
        options.append(_noted(mechanism, chosen))
    config.attention, config.attention_options = names, options


def _noted(mechanism: Mechanism, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a mechanism with the features that it has now; of a mixed one, those of its parts."""
    if isinstance(mechanism, MixedAttention):
        parts = zip(mechanism.mechanisms(), options["parts"], strict=True)
        return options | {"parts": [_noted(part, given) for part, given in parts]}
    if not isinstance(mechanism, FavorAttention):
        return options
    options = {name: value for name, value in options.items() if name != "transform"}
    options |= {"estimator": mechanism.estimator, "num_features": mechanism.num_features}
    return options | ({"transform": True} if mechanism.transform else {})
