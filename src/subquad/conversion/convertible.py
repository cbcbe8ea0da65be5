"""The layers of a model that is being converted: what each key head can become, tried for a while or for good."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.conversion.candidates import Candidate, Priced
from subquad.conversion.choosing import Choice
from subquad.conversion.generation import CHILD
from subquad.conversion.measured import Judge, Measured
from subquad.conversion.policy import LayerPolicy, layer_mechanisms, layer_policy
from subquad.conversion.swap import attention_modules, mechanisms_in_place, mechanisms_of, swap_attention
from subquad.mechanism import Mechanism
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention


class Layers(NamedTuple):
    """priced: by the names of the layers, in the order of their calls."""

    model: Any
    found: Sequence[Candidate]
    priced: dict[str, Priced]

    def measured(self, choice: Choice, judge: Judge) -> Measured:
        """What the choice costs; the model stays as it is."""
        mechanisms = mechanisms_of(self.model, *self._options(choice))
        self._give_features(mechanisms)
        with mechanisms_in_place(self.model, mechanisms):
            return judge.measured()

    def become(self, choice: Choice) -> tuple[LayerPolicy, ...]:
        """Swaps the attention."""
        attention, options = self._options(choice)
        swap_attention(self.model, attention, layer_options=options)
        self._give_features([getattr(module, CHILD) for _, module in attention_modules(self.model)])
        told = zip(self.priced.items(), choice, strict=True)
        return tuple(layer_policy(name, self.found, layer, own) for (name, layer), own in told)

    def _options(self, choice: Choice) -> tuple[list[str], list[dict[str, Any]]]:
        """Names and options of the mechanisms, in the order of the modules."""
        by_name = {name: layer_mechanisms(self.found, own) for name, own in zip(self.priced, choice, strict=True)}
        in_order = [by_name[name] for name, _ in attention_modules(self.model)]
        return [name for name, _ in in_order], [options for _, options in in_order]

    def _give_features(self, mechanisms: Sequence[Mechanism]) -> None:
        """To every part those of its heads."""
        for (name, _), mechanism in zip(attention_modules(self.model), mechanisms, strict=True):
            _adopt(mechanism, self.priced[name].features)


@torch.no_grad()
def _adopt(mechanism: Mechanism, fitted: dict[str, Tensor]) -> None:
    parts: list[tuple[Mechanism, Any]] = [(mechanism, slice(None))]
    if isinstance(mechanism, MixedAttention):
        parts = list(zip(mechanism.mechanisms(), map(list, mechanism.partition.heads), strict=True))
    for part, heads in parts:
        if isinstance(part, FavorAttention):
            for name, parameter in part.features.named_parameters():
                parameter.copy_(fitted[name][heads])
