"""Checks of `subquad.nn`."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from subquad.checks import count, dense_layout, dtype_name, float_tensor, key_mask, shape_of
from subquad.errors import BackendError, ConfigError, DtypeError, MaskError, ShapeError

SomeClass = TypeVar("SomeClass")


def heads(hidden_size: int, num_heads: int, key_heads: int, head_dim: int | None) -> None:
    for name, value in (("hidden size", hidden_size), ("num_heads", num_heads), ("num_key_value_heads", key_heads)):
        count("attention layer", name, value)
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"attention layer: the hidden size must be a multiple of the heads, got {hidden_size} and {num_heads}"
        )
    if num_heads % key_heads:
        raise ConfigError(
            f"attention layer: num_heads must be a multiple of num_key_value_heads, got {num_heads} and {key_heads}"
        )


def shared_heads(shared_qk: bool, num_heads: int, key_heads: int) -> None:
    if shared_qk and num_heads != key_heads:
        raise ConfigError(
            f"attention layer: shared_qk=True makes keys of the queries, so num_key_value_heads must be num_heads, "
            f"got {key_heads} and {num_heads}"
        )


def qk_norm(value: Any, shared_qk: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"attention layer: qk_norm must be True or False, got {value!r}")
    if value and shared_qk:
        raise ConfigError("attention layer: with shared_qk=True keys are normalised already; leave qk_norm out")


def convolved(x: Tensor, mask: Tensor | None, weight: Tensor) -> None:
    """What a short convolution with `weight` `[channels, 1, width]` takes."""
    op, channels = "short convolution", weight.shape[0]
    float_tensor(op, "x", x)
    if x.dim() != 3 or x.shape[2] != channels:
        raise ShapeError(f"{op}: x must be [batch, length, {channels}], got {shape_of(x)}")
    if x.device != weight.device:
        raise BackendError(f"{op}: x must be on the device of the weights, got {x.device} and {weight.device}")
    key_mask(op, mask, x[:, None])


def recent_tokens(recent: Any, x: Tensor, width: int) -> None:
    """What a short convolution remembers of the tokens before x `[B, T, channels]`."""
    wanted = (x.shape[0], width - 1, x.shape[2])
    if isinstance(recent, Tensor):
        dense_layout("short convolution", "the state", recent)
    if not isinstance(recent, Tensor) or recent.shape != wanted:
        got = shape_of(recent) if isinstance(recent, Tensor) else type(recent).__name__
        raise ShapeError(f"short convolution: the state must hold the last inputs {list(wanted)}, got {got}")
    if recent.dtype != x.dtype:
        raise DtypeError(
            f"short convolution: the state holds {dtype_name(recent.dtype)}, but the new tokens are "
            f"{dtype_name(x.dtype)}; cast one of them"
        )
    if recent.device != x.device:
        raise BackendError(f"short convolution: the state is on {recent.device}, the new tokens on {x.device}")


def layer_state(state: Any, kind: type[SomeClass]) -> SomeClass | None:
    """The state of a layer with short convolutions."""
    if state is None or isinstance(state, kind):
        return state
    raise ShapeError(
        f"attention layer: state must be the LayerState that extend returned, or None to begin, got "
        f"{type(state).__name__}; a layer without short convolutions has another state"
    )


def no_head_dim(name: str, options: dict[str, Any]) -> None:
    for option in ("head_dim", "name"):
        if option in options:
            raise ConfigError(f"{name}: {option} is settled by the layer; leave it out of the options")


def multihead_options(dropout: float, add_bias_kv: bool, add_zero_attn: bool) -> None:
    if dropout:
        raise ConfigError(
            f"MultiheadAttention: attention weights are never formed, so they cannot be dropped; use dropout=0, "
            f"got {dropout}"
        )
    for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
        if value:
            raise ConfigError(f"MultiheadAttention: {name}=True is not supported; leave it out")


def multihead_inputs(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    op = "MultiheadAttention"
    for name, x, size in (("query", query, layer.embed_dim), ("key", key, layer.kdim), ("value", value, layer.vdim)):
        if x.is_nested:
            raise ShapeError(f"{op}: {name} is a nested tensor; make the encoder with enable_nested_tensor=False")
        if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
            layout = "[batch, length, {}]" if layer.batch_first else "[length, batch, {}]"
            raise ShapeError(f"{op}: {name} must be {layout.format(size)} or [length, {size}], got {shape_of(x)}")
    if layer.mechanism.positional and key is not query:
        raise ShapeError(
            f"{op}: {layer.mechanism.name} compares positions, so key must be query (self-attention)"
            + (f"; {advice}" if (advice := layer.mechanism.cross_attention_advice) else "")
        )


def causal_attn_mask(mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> bool:
    """Whether attention is causal; a mask may say so, or be left out. `[.., T, E]` query and key."""
    if mask is None:
        return is_causal
    length, keys = query.shape[-2], key.shape[-2]
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    causal = torch.ones(length, keys, dtype=torch.bool, device=mask.device).triu(1)
    plain = mask.dtype == torch.bool or bool((mask.masked_fill(hidden, 0) == 0).all())
    if mask.shape != causal.shape or not plain or not torch.equal(hidden, causal):
        raise MaskError(
            f"MultiheadAttention: attn_mask may only be the causal mask [{length}, {keys}] (True or -inf above the "
            f"diagonal), got another one of shape {shape_of(mask)}; sub-quadratic attention cannot apply it"
        )
    return True


def real_from_padding(padding: Tensor | None) -> Tensor | None:
    """Our key_mask (True = real) from torch's key_padding_mask (True, or -inf, = padding)."""
    if padding is None:
        return None
    if padding.dtype == torch.bool:
        return ~padding
    if padding.is_floating_point() and bool(((padding == 0) | (padding == -torch.inf)).all()):
        return padding == 0
    raise MaskError(
        "MultiheadAttention: key_padding_mask must be bool (True = padding) or hold 0 and -inf only, "
        f"got {str(padding.dtype).removeprefix('torch.')}"
    )
