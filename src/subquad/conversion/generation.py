"""Generation by swapped models: transformers' own calls, with states of mechanisms in the place of keys and values.

Where transformers is about to fill an empty cache of keys and values, a hook gives the model a cache of states instead,
which comes back with the output. Attention modules hand their new keys to the cache as ever; it marks them with the
state that they extend, which our attention function finds there.
"""

import inspect
from typing import Any, cast

from torch import Tensor, nn
from transformers import DynamicCache

from subquad.checks import conversion as checks
from subquad.mechanism import Mechanism, State
from subquad.models.cache import StateLayer, SubquadCache

IMPLEMENTATION = "subquad"  # our name among the attention functions of transformers
CHILD = "subquad_attention"  # our name in an attention module
MARK = "subquad_layer"  # our name in the keys of a call


class KeyedLayer(StateLayer):
    """The state of one layer, which is told of new tokens by their keys."""

    awaited = 0  # tokens whose keys were marked, and whose attention has not come yet

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys = key_states.view_as(key_states)  # a tensor of this call alone
        setattr(keys, MARK, self)
        self.awaited += keys.shape[2]
        return keys, value_states

    def extend(self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The output for new tokens. mask bool `[B, past + T]`, of earlier tokens, too, or None."""
        new, past = k.shape[2], cast("State | None", self.state)
        out, state = mechanism.extend(q, k, v, past, key_mask=None if mask is None else mask[:, -new:])
        self.set(state, new)
        self.awaited -= new
        return out

    def take(self, other: StateLayer) -> None:
        super().take(other)
        self.awaited = 0  # of a call that failed

    def reset(self) -> None:
        super().reset()
        self.awaited = 0


class StateCache(SubquadCache):
    """What a swapped model generates with. `copy.deepcopy` keeps it as it is: a prompt read once is continued often.

    Example:
        >>> StateCache(num_layers=2).get_seq_length()
        0
    """

    layer_class = KeyedLayer
    mask: Tensor | None = None  # `[B, past + T]` of the call that has begun

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == 0:  # all layers get the same tokens
            new, mask = key_states.shape[2], self.mask
            self.mask = None
            real = None if mask is None or mask.dim() != 2 else mask[:, -new:].bool()  # others are refused later
            self.advance(key_states.shape[0], new, real, key_states.device)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def keyed_layer(k: Tensor) -> KeyedLayer | None:
    """Whose keys they are, if they came by a cache of states."""
    return getattr(k, MARK, None)


def use_states(model: nn.Module) -> None:
    """From now on the model generates with states, if its mechanisms have some."""
    if _give_states not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_give_states, with_kwargs=True)
        model.register_forward_hook(_all_are_extended)


def _give_states(model: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if len(args) > 1:  # whatever stands in its place, by name
        args, given = (), dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | given
    cache = given.get("past_key_values")
    empty = type(cache) is DynamicCache and cache.get_seq_length() == 0  # generate() has made it
    wanted = empty or (cache is None and bool(given.get("use_cache")))
    if wanted and model.config._attn_implementation == IMPLEMENTATION and _all_have_states(model):
        cache = StateCache(model.config.get_text_config(decoder=True).num_hidden_layers)
        given = given | {"past_key_values": cache}
    if isinstance(cache, StateCache):
        cache.mask = given.get("attention_mask")
    return args, given


def _all_have_states(model: nn.Module) -> bool:
    children = (getattr(module, CHILD, None) for module in model.modules())
    return all(mechanism.supports_state for mechanism in children if isinstance(mechanism, Mechanism))


def _all_are_extended(model: nn.Module, _: Any, output: Any) -> None:
    for cache in output if isinstance(output, tuple) else output.values():
        if isinstance(cache, StateCache):
            layers: list[Any] = cache.layers
            checks.keys_arrived(type(model).__name__, [layer.awaited for layer in layers])
