"""Checks and errors of window attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad import checks
from subquad.errors import BackendError, ConfigError, MaskError, ShapeError


def width(value: Any) -> int:
    if checks.count("window", "window", value) % 2:
        raise ConfigError(f"window: window must be even, half of it on each side of a token, got {value}")
    return value


def dilation(value: Any) -> tuple[int, ...]:
    """One for all heads, or one for each key head."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ConfigError("window: dilation must be a number or one for each key head, got an empty list")
        return tuple(checks.count("window", "dilation", one) for one in value)
    return (checks.count("window", "dilation", value),)


def dilation_heads(dilation: tuple[int, ...], k: Tensor) -> None:
    if len(dilation) not in (1, k.shape[1]):
        raise ShapeError(
            f"window: dilation has {len(dilation)} entries, one for each key head, but k has {k.shape[1]} heads"
        )


def global_mask(mask: Tensor | None, k: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype).removeprefix("torch.") if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError(f"window: global_mask must be a bool tensor, True where a token is global, got {got}")
    checks.dense_layout("window", "global_mask", mask)
    if mask.shape != (k.shape[0], k.shape[2]):
        wanted = f"[{k.shape[0]}, {k.shape[2]}]"
        raise MaskError(f"window: global_mask must be [batch, length] = {wanted}, got {checks.shape_of(mask)}")
    if mask.device != k.device:
        raise BackendError(f"window: global_mask must be on the device of k, got {mask.device} and {k.device}")


def global_qkv(own: Any, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    if own is None:
        return
    if mask is None:
        raise ConfigError("window: global_qkv is for tokens of global_mask; give both or neither")
    if not isinstance(own, tuple | list) or len(own) != 3:
        raise ShapeError(f"window: global_qkv must be three tensors (q, k, v), got {type(own).__name__}")
    names = ("q", "k", "v")
    for name, given, usual in zip(names, own, (q, k, v), strict=True):
        checks.weights("window", f"{name} of global_qkv", given)
        if given.shape != usual.shape or given.dtype != usual.dtype or given.device != usual.device:
            raise ShapeError(
                f"window: global_qkv must be like q, k and v, got {name} {checks.shape_of(given)} "
                f"and {checks.shape_of(usual)}"
            )
