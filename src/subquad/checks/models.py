"""Checks of `subquad.models`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.checks import shape_of
from subquad.errors import BackendError, ConfigError, DtypeError, MaskError, ShapeError


def even_head_dim(positions: str, head_dim: int) -> None:
    if positions == "rotary" and head_dim % 2:
        raise ConfigError(
            f"SubquadConfig: positions='rotary' turns pairs, so the head dim must be even, got {head_dim}"
        )


def position_settings(positions: str, hidden_size: int, rope_theta: float, norm_eps: float) -> None:
    if positions == "sinusoidal" and hidden_size % 2:
        raise ConfigError(f"SubquadConfig: positions='sinusoidal' needs an even hidden_size, got {hidden_size}")
    for name, value in (("rope_theta", rope_theta), ("norm_eps", norm_eps)):
        if not value > 0:
            raise ConfigError(f"SubquadConfig: {name} must be positive, got {value!r}")


def layer_lists(attention: Any, options: Any, layers: int) -> None:
    for name, value, single in (("attention", attention, str), ("attention_options", options, (dict, type(None)))):
        if isinstance(value, single):
            continue
        if not isinstance(value, list):
            raise ConfigError(f"SubquadConfig: {name} must be one value or a list of {layers}, got {value!r}")
        if len(value) != layers:
            raise ConfigError(
                f"SubquadConfig: {name} must have one entry for each of {layers} layers, got {len(value)}"
            )
    for entry in options if isinstance(options, list) else []:
        if not isinstance(entry, dict):
            raise ConfigError(f"SubquadConfig: each of attention_options must be a dict, got {entry!r}")
    if isinstance(attention, list) and isinstance(options, dict) and options and len(set(attention)) > 1:
        raise ConfigError(
            "SubquadConfig: layers with different mechanisms need a list of attention_options, one for each layer; "
            f"got {options!r} for all"
        )


def head_direction(config: Any, head: str, *, causal: bool) -> Any:
    """The config with its direction settled."""
    if config.causal is not None and config.causal != causal:
        raise ConfigError(f"{head}: needs causal={causal}, got causal={config.causal} in the config; leave it out")
    config.causal = causal
    return config


def can_be_causal(mechanisms: Sequence[Any]) -> None:
    for mechanism in mechanisms:
        if not mechanism.supports_causal:
            raise ConfigError(
                f"SubquadForCausalLM: {mechanism.name} cannot be causal, {mechanism.why_not_causal}; "
                "use SubquadForMaskedLM (objective='masked') or another attention"
            )


def can_be_bidirectional(head: str, mechanisms: Sequence[Any], advice: str) -> None:
    for mechanism in mechanisms:
        if not mechanism.supports_bidirectional:
            raise ConfigError(
                f"{head}: {mechanism.name} can only be causal, {mechanism.why_not_bidirectional}; "
                f"use {advice} or another attention"
            )


def same_in_all_layers(name: str, shape: Sequence[int], first: str, wanted: Sequence[int]) -> None:
    if tuple(shape) != tuple(wanted):
        raise ConfigError(
            f"subquad model: {name} is to be {first}, but has the shape {list(shape)} instead of {list(wanted)}; "
            "give all layers that share it the same attention_options"
        )


def one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    if (input_ids is None) == (inputs_embeds is None):
        came = "neither" if input_ids is None else "both"
        raise ConfigError(f"subquad model: give input_ids or inputs_embeds, got {came}")
    given = inputs_embeds if input_ids is None else input_ids
    dims = 2 if input_ids is not None else 3
    if given is not None and (given.dim() != dims or 0 in given.shape):
        wanted = "input_ids [batch, length]" if dims == 2 else "inputs_embeds [batch, length, hidden]"
        raise ShapeError(f"subquad model: wants {wanted}, none of them empty, got {shape_of(given)}")


def no_attention_output(asked: bool | None) -> None:
    if asked:
        raise ConfigError(
            "subquad model: output_attentions=True is not supported, weights are quadratic; "
            "look at chosen rows with mechanism.attention_matrix(q, k, rows=...)"
        )


def model_mask(mask: Tensor | None, x: Tensor, past: int) -> Tensor | None:
    """key_mask `[B, T]` of the new tokens, True = real; None if all are."""
    if mask is None:
        return None
    batch, new = x.shape[:2]
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (new, past + new):
        also = f" or [{batch}, {past + new}]" if past else ""
        raise MaskError(f"subquad model: attention_mask must be [{batch}, {new}]{also}, got {shape_of(mask)}")
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        raise MaskError("subquad model: attention_mask must hold 1 for real tokens and 0 for padding")
    mask = mask[:, -new:].bool()
    return None if bool(mask.all()) else mask


def one_sequence_a_row(name: str, positions: Tensor, mask: Tensor | None) -> None:
    """Positions of real tokens that do not grow are those of several sequences in one row. mask `[B, T]` or None."""
    if positions.dim() != 2 or positions.shape[1] < 2:
        return
    if mask is not None and mask.dim() == 2:  # padding has any position: leave it behind the real tokens
        real = mask[:, -positions.shape[1] :].bool()
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
        positions = positions.expand(len(real), -1).gather(1, order)
        real = real.gather(1, order)[:, 1:]
        again = (positions[:, 1:] <= positions[:, :-1]) & real
    else:
        again = positions[:, 1:] <= positions[:, :-1]
    if bool(again.any()):
        row, place = again.nonzero()[0].tolist()
        raise ConfigError(
            f"{name}: position_ids go from {int(positions[row, place])} to {int(positions[row, place + 1])} within row "
            f"{row}: sequences packed into one row would attend to each other; give each sequence a row of its own"
        )


def learned_positions(positions: Tensor, known: int) -> None:
    last = int(positions.max())
    if last >= known:
        raise ConfigError(
            f"subquad model: position {last} is beyond the {known} learned ones; "
            "use positions='rotary' for lengths never trained on"
        )


def sequences(given: Sequence[Tensor]) -> None:
    for number, ids in enumerate(given):
        if ids.dim() != 1 or not len(ids):
            raise ShapeError(f"sequence {number}: must be a vector of at least one token id, got {shape_of(ids)}")


def start_tokens(given: Tensor) -> Tensor:
    if not len(given):
        raise ConfigError("log_likelihoods: start must have at least one token, which the first one is judged after")
    return given


def goes_on(model: Any, cache: Any, piece: int) -> Any:
    """What the next piece of a long sequence is read with."""
    if cache is None:
        raise ConfigError(
            f"log_likelihoods: {type(model).__name__} gives no past_key_values, so a sequence of more than {piece} "
            "tokens cannot be read piece by piece; give shorter ones"
        )
    return cache


def cache(given: Any, kind: type, causal: bool, layers: int) -> None:
    if not causal:
        raise ConfigError("subquad model: only a causal model can continue a sequence; use_cache needs causal=True")
    if given is not None and not isinstance(given, kind):
        raise DtypeError(f"subquad model: past_key_values must be a {kind.__name__}, got {type(given).__name__}")
    if given is not None and len(given.layers) != layers:
        raise ShapeError(f"subquad model: the cache has {len(given.layers)} layers, the model {layers}")


def like_this_cache(cache: Any, kept: Any) -> None:
    if type(kept) is not type(cache):
        raise DtypeError(f"{type(cache).__name__}: can only be restored from one, got {type(kept).__name__}")
    if len(kept.layers) != len(cache.layers):
        raise ShapeError(
            f"{type(cache).__name__}: has {len(cache.layers)} layers, what it is to be restored from {len(kept.layers)}"
        )


# Errors to raise ------------------------------------------------------------------------------------------------------


def cache_is_ours(implementation: str) -> ConfigError:
    return ConfigError(
        f"generate: cache_implementation={implementation!r} holds keys and values, subquad models keep states; "
        "leave it out"
    )


def reversible_keeps_nothing() -> ConfigError:
    return ConfigError("gradient checkpointing: reversible layers keep no activations already; use one of the two")


def reversible_hides_states() -> ConfigError:
    return ConfigError(
        "subquad model: reversible layers keep no hidden states; output_hidden_states needs reversible=False"
    )


def state_cache_only(method: str) -> BackendError:
    return BackendError(
        f"SubquadCache: holds the states of whole sequences, so {method} is impossible; "
        "assisted and contrastive decoding need it, other kinds of generate() do not"
    )
