"""Queries, keys, values, masks and weights that a user gives: dtype, device, layout and shapes that go together."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from subquad.errors import BackendError, ConfigError, DtypeError, MaskError, ShapeError, SubquadError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STRIDED = torch.strided


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]`, H a multiple of K; one float dtype, one device."""
    _tensors(op, q=q, k=k, v=v)
    _fit(op, q, k)
    if v.shape[:3] != k.shape[:3]:
        raise ShapeError(f"{op}: v must have the batch, heads and length of k, got k {shape_of(k)} and v {shape_of(v)}")


def qk(op: str, q: Tensor, k: Tensor) -> None:
    _tensors(op, q=q, k=k)
    _fit(op, q, k)


def _fit(op: str, q: Tensor, k: Tensor) -> None:
    (batch, heads, _, dim), (key_batch, key_heads, _, key_dim) = q.shape, k.shape
    if batch != key_batch:
        raise ShapeError(f"{op}: q and k must share the batch size, got q {shape_of(q)} and k {shape_of(k)}")
    if dim != key_dim:
        raise ShapeError(f"{op}: q and k must share the head dim (last), got q {shape_of(q)} and k {shape_of(k)}")
    if heads % key_heads:
        raise ShapeError(
            f"{op}: the heads of q must be a multiple of those of k and v, got {heads} and {key_heads}; "
            "the layout is [batch, heads, length, dim]"
        )


def _tensors(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout is not STRIDED:
            dense_layout(op, name, tensor)
        if tensor.dim() != 4:
            raise ShapeError(f"{op}: {name} must be [batch, heads, length, dim], got {shape_of(tensor)}")
        if 0 in tensor.shape:
            raise ShapeError(f"{op}: {name} must have no empty dimension, got {shape_of(tensor)}")
        if tensor.dtype not in FLOAT_DTYPES:
            names = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
            raise DtypeError(f"{op}: {name} must be one of {names}, got {dtype_name(tensor.dtype)}")
    first, *others = tensors.values()
    dtype, device = first.dtype, first.device
    for tensor in others:
        if tensor.dtype != dtype or tensor.device != device:
            raise _not_alike(op, tensors)


def _not_alike(op: str, tensors: dict[str, Tensor]) -> SubquadError:
    """Of several dtypes, or else on several devices."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(dtype_name(tensor.dtype) for tensor in tensors.values())
        return DtypeError(f"{op}: {_list(tensors)} must share one dtype, got {dtypes}; cast them to one")
    devices = ", ".join(str(tensor.device) for tensor in tensors.values())
    return BackendError(f"{op}: {_list(tensors)} must be on one device, got {devices}")


def dense_layout(op: str, name: str, tensor: Tensor) -> None:
    """Neither sparse nor nested: those have no sizes, or no strides."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise BackendError(f"{op}: {name} must be a dense tensor, got {kind}; use .to_dense() or padding")


def _list(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def float_tensor(op: str, name: str, tensor: Any) -> None:
    """Numbers of any precision."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    dense_layout(op, name, tensor)
    if tensor.dtype not in FLOAT_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
        raise DtypeError(f"{op}: {name} must be one of {names}, got {dtype_name(tensor.dtype)}")


def weights(op: str, name: str, tensor: Any) -> None:
    """The same, and not empty."""
    float_tensor(op, name, tensor)
    if 0 in tensor.shape:
        raise ShapeError(f"{op}: {name} must have no empty dimension, got {shape_of(tensor)}")


def head_dim(op: str, expected: int, q: Tensor) -> None:
    if q.shape[-1] != expected:
        raise ShapeError(f"{op}: made for head_dim={expected}, got q {shape_of(q)}")


def causal_lengths(op: str, causal: bool, q: Tensor, k: Tensor) -> None:
    if not isinstance(causal, bool):
        raise ConfigError(f"{op}: causal must be True or False, got {causal!r}")
    if not causal:
        return
    if q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{op}: causal=True needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}; "
            "to continue a sequence, use extend(q, k, v, state)"
        )


def extend_lengths(op: str, q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{op}: extend takes the new tokens only, as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )


def self_attention(op: str, q: Tensor, k: Tensor, advice: str = "") -> None:
    if q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{op}: compares positions, so it needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
            + (f"; {advice}" if advice else "")
        )


def key_mask(op: str, mask: Tensor | None, k: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise MaskError(f"{op}: key_mask must be a bool tensor, got {type(mask).__name__}")
    dense_layout(op, "key_mask", mask)
    if mask.dtype != torch.bool:
        raise MaskError(
            f"{op}: key_mask must be bool, True where the token is real, got {dtype_name(mask.dtype)}; "
            "use mask.bool() if 1 means real"
        )
    if mask.shape != (k.shape[0], k.shape[2]):
        raise MaskError(f"{op}: key_mask must be [batch, keys] = [{k.shape[0]}, {k.shape[2]}], got {shape_of(mask)}")
    if mask.device != k.device:
        raise BackendError(f"{op}: key_mask must be on the device of k, got {mask.device} and {k.device}")


def right_padding(op: str, mask: Tensor | None) -> None:
    """No real token after a masked one."""
    if mask is None:
        return
    late = mask[:, 1:] & ~mask[:, :-1]
    if bool(late.any()):
        sequence, position = late.nonzero()[0].tolist()
        raise MaskError(
            f"{op}: its projections are bound to positions, so key_mask may pad on the right only, but in sequence "
            f"{sequence} token {position + 1} is real and the one before is masked; move the padding to the end"
        )


def rows(op: str, rows: Tensor | None, q: Tensor) -> None:
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = f"{dtype_name(rows.dtype)} {shape_of(rows)}" if isinstance(rows, Tensor) else f"{rows!r}"
        raise ShapeError(f"{op}: rows must be a 1-D int64 tensor of query positions, got {got}")
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < q.shape[2]):
        raise ShapeError(f"{op}: rows must lie in 0..{q.shape[2] - 1}, got {int(rows.min())}..{int(rows.max())}")
