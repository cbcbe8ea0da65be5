"""Calibrated features in the config of a model, so that a saved one comes back with the features it has now."""

from typing import Any, Protocol, runtime_checkable

from torch import nn

from subquad.mechanism import Mechanism
from subquad.mechanisms.favor import FavorAttention


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
    mechanisms = (module for module in model.modules() if isinstance(module, Mechanism))
    for layer, mechanism in enumerate(mechanisms):
        name, chosen = config.layer_attention(layer)
        if isinstance(mechanism, FavorAttention):
            chosen |= {"estimator": mechanism.estimator, "num_features": mechanism.num_features}
            chosen.pop("transform", None)
            chosen |= {"transform": True} if mechanism.transform else {}
        names.append(name)
        options.append(chosen)
    config.attention, config.attention_options = names, options
