"""Checks of `subquad.conversion`."""

from typing import Any

from torch import Tensor

from subquad.checks import shape_of
from subquad.errors import ConfigError, MaskError


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


def goes_through_us(model: Any, implementation: str) -> None:
    if model.config._attn_implementation != implementation:
        raise ConfigError(f"swap_attention: {type(model).__name__} does not let its attention be replaced")


def no_dropout(name: str, dropout: float) -> None:
    if dropout:
        raise ConfigError(
            f"{name}: drops attention weights with probability {dropout} in training, but without a matrix of weights "
            "there is nothing to drop; set its attention dropout to 0"
        )


def padding_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and mask.dim() != 2:
        raise MaskError(f"{name}: attention_mask must be [batch, length], 1 for real tokens, got {shape_of(mask)}")
