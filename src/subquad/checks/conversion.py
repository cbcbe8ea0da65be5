"""Checks of `subquad.conversion`."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.checks import shape_of
from subquad.errors import ConfigError, MaskError


def of_each_layer(
    attention: Any, options: dict[str, Any], layer_options: Any, layers: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """A name and options for each layer."""
    names = [attention] * layers if isinstance(attention, str) else attention
    given = [options] * layers if layer_options is None else layer_options
    for what, entries, kind in (("attention", names, str), ("layer_options", given, dict)):
        is_list = isinstance(entries, (list, tuple)) and all(isinstance(entry, kind) for entry in entries)
        if not is_list or len(entries) != layers:
            raise ConfigError(
                f"swap_attention: {what} must be a list with a {kind.__name__} for each of {layers} layers, "
                f"got {entries!r}"
            )
    if options and layer_options is not None:
        raise ConfigError(f"swap_attention: got options for all layers ({', '.join(options)}) and layer_options")
    if options and len(set(names)) > 1:
        raise ConfigError(
            "swap_attention: layers with different mechanisms need layer_options, a dict for each layer; "
            f"got {options!r} for all"
        )
    return list(names), [dict(entry) for entry in given]


def converted_folder(folder: Any) -> None:
    try:
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: has no config.json, so it is no saved model") from error
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: its config.json cannot be read ({error})") from error
    if kind != "subquad_converted":
        raise ConfigError(
            f"{folder}: is a model of type {kind!r}, not one whose attention was swapped; load it with transformers"
        )


def base_of_converted(base_type: Any, base: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(base_type, str) or not isinstance(base, dict):
        raise ConfigError("a converted model must say in its config.json which model it was (base_type, base)")
    return base_type, base


def head_of(auto: Any, config: type, model_type: str) -> Any:
    try:
        return auto._model_mapping[config]
    except KeyError as error:
        raise ConfigError(f"{auto.__name__}: {model_type} has no such model") from error


def something_to_swap(model: Any, modules: int) -> None:
    if not hasattr(model, "set_attn_implementation") or not modules:
        raise ConfigError(
            f"swap_attention: {type(model).__name__} is no Hugging Face model whose attention can be replaced"
        )


def self_attention_module(name: str, module: Any) -> None:
    """Queries, keys and values of the same tokens."""
    crossed = name.endswith(("encoder_attn", "crossattention", "cross_attn", "EncDecAttention"))
    if crossed or getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ConfigError(f"swap_attention: {name} is cross-attention; only self-attention can be replaced")


def tells_its_heads(name: str, module: Any) -> None:
    """T5's do not, and add a bias by distance, which no mechanism here has."""
    if getattr(module, "relative_attention_bias", None) is not None or getattr(
        module, "has_relative_attention_bias", 0
    ):
        raise ConfigError(f"swap_attention: {name} adds a bias by distance to its logits, which no mechanism can")
    if not getattr(module, "head_dim", None) and not getattr(module, "attention_head_size", None):
        raise ConfigError(
            f"swap_attention: {name} ({type(module).__name__}) has neither head_dim nor attention_head_size; only "
            "models that say how wide their heads are can have their attention replaced"
        )


def goes_through_us(model: Any, implementation: str) -> None:
    if model.config._attn_implementation != implementation:
        raise ConfigError(f"swap_attention: {type(model).__name__} does not let its attention be replaced")


def mechanism_there(name: str, mechanism: Any) -> Any:
    if mechanism is None:
        raise ConfigError(
            f"{name}: has no mechanism of subquad; attn_implementation='subquad' alone gives it none, call "
            "swap_attention(model, ...), or subquad.load(folder) for a model that was saved with one"
        )
    return mechanism


def causal_if_cached(name: str, causal: bool) -> None:
    if not causal:
        raise ConfigError(f"{name}: is not causal, so it cannot go on from a state; use_cache=False")


def keys_arrived(model: str, awaited: list[int]) -> None:
    """awaited: tokens by layer whose keys went to the cache, but not on to their mechanism."""
    lost = [layer for layer, tokens in enumerate(awaited) if tokens]
    if lost:
        raise ConfigError(
            f"{model}: the keys of layers {', '.join(map(str, lost))} are changed between the cache and attention, so "
            "they did not reach the states; use_cache=False"
        )


def no_dropout(name: str, dropout: float) -> None:
    if dropout:
        raise ConfigError(
            f"{name}: drops attention weights with probability {dropout} in training, but without a matrix of weights "
            "there is nothing to drop; set its attention dropout to 0"
        )


def padding_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and mask.dim() != 2:
        raise MaskError(f"{name}: attention_mask must be [batch, length], 1 for real tokens, got {shape_of(mask)}")
