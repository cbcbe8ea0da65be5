"""Tensors and numbers that cross into an engine: the torch operators, and the gate to the C++ engine."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subquad.checks.tensors import dense_layout, dtype_name, shape_of
from subquad.errors import BackendError, ConfigError, DtypeError, ShapeError, SubquadError

Size = int | str | tuple[int, ...]  # a size, a letter for any, or several that will do


def tensor(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[Size]) -> None:
    """A tensor of one of the dtypes and of the shape. Sizes that are symbols of a traced graph are not looked at."""
    dense_layout(op, name, tensor)
    if tensor.dtype not in dtypes:
        raise wrong_dtype(op, name, tensor, dtypes)
    if tensor.dim() != len(shape) or not all(map(_fits, tensor.shape, shape)):
        raise wrong_shape(op, name, tensor, shape)


def _fits(size: int, wanted: Size) -> bool:
    if isinstance(wanted, str):
        return True
    sizes = wanted if isinstance(wanted, tuple) else (wanted,)
    return size in sizes if isinstance(size, int) and all(isinstance(s, int) for s in sizes) else True


def device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise BackendError(f"{op}: {name} is on {tensor.device}, q on {like.device}; move one of them")


def number(op: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{op}: {name} must lie between {low} and {high}, got {value}")


def indices(op: str, name: str, tensor: Tensor, most: int) -> None:
    low, high = (int(x) for x in tensor.aminmax()) if tensor.numel() else (0, 0)
    if low < 0 or high > most:
        raise ShapeError(f"{op}: {name} must lie in 0..{most}, got {low}..{high}")


def choice(op: str, name: str, value: int, choices: Sequence[int]) -> None:
    if value not in choices:
        raise ConfigError(f"{op}: {name} must be {' or '.join(map(str, choices))}, got {value}")


def no_transforms(*tensors: Tensor | None) -> None:
    """The operators have gradients for torch.autograd; under other transforms torch would silently return zeros."""
    if torch.compiler.is_compiling():
        return
    if transformed() or (forward_mode() and any(_is_dual(t) for t in tensors)):
        raise BackendError(
            "subquad: torch.func transforms (vmap, grad, jvp) and forward-mode derivatives are not supported by the "
            "fast engine; fold a mapped dimension into the batch, use torch.autograd.grad, or mechanism.reference(...)"
        )


def transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    return functorch is not None and functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken: no tensor has any outside of that. If torch does not say
    (the name is its own), they might be."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def _is_dual(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


# Errors to raise ------------------------------------------------------------------------------------------------------


def wrong_dtype(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> DtypeError:
    wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
    return DtypeError(f"{op}: {name} must be {wanted}, got {dtype_name(tensor.dtype)}")


def wrong_shape(op: str, name: str, tensor: Tensor, shape: Sequence[Size]) -> ShapeError:
    sizes = (" or ".join(map(str, size)) if isinstance(size, tuple) else str(size) for size in shape)
    return ShapeError(f"{op}: {name} must be [{', '.join(sizes)}], got {shape_of(tensor)}")


def unreadable(op: str, name: str, tensor: Tensor) -> SubquadError:
    """Why C++ cannot read a tensor of the right dtype and shape."""
    if not tensor.is_cpu:
        return BackendError(f"{op}: {name} must be on the CPU, got {tensor.device}")
    if tensor.is_neg():
        return BackendError(f"{op}: {name} is negated lazily; use .resolve_neg()")
    if not tensor.data_ptr():
        return BackendError(f"{op}: {name} has no memory of its own; use .clone()")
    if tensor.data_ptr() % tensor.element_size():
        return BackendError(f"{op}: {name} begins in the middle of a number; use .clone()")
    return BackendError(f"{op}: {name} must have its numbers side by side, got strides {list(tensor.stride())}")


def beyond_memory(op: str, name: str, needed: int, there: int) -> BackendError:
    return BackendError(f"{op}: {name} reaches over {needed} bytes, but its storage was cut to {there}")


def not_plain(op: str, name: str, tensor: object) -> SubquadError:
    if isinstance(tensor, Tensor):
        return BackendError(f"{op}: {name} is a {type(tensor).__name__}, which has no numbers that C++ could read")
    return DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")


def wrong_length(op: str, name: str, value: int, limit: int) -> ShapeError:
    return ShapeError(f"{op}: {name} counts tokens, so it must lie between 0 and {limit - 1}, got {value}")


def not_one_token(op: str, dtype: torch.dtype, shapes: Sequence[torch.Size]) -> ShapeError:
    got = ", ".join(str(list(shape)) for shape in shapes)
    return ShapeError(
        f"{op}: q, k and v must be [batch, heads, 1, dim], got {got} in {str(dtype).removeprefix('torch.')}"
    )


def missing(op: str, name: str) -> ShapeError:
    return ShapeError(f"{op}: {name} is missing")


def empty(op: str, name: str, tensor: Tensor) -> ShapeError:
    return ShapeError(f"{op}: {name} must have no empty dimension, got {shape_of(tensor)}")


def ungrouped(op: str, heads: int, key_heads: int) -> ShapeError:
    return ShapeError(f"{op}: the heads of q must be a multiple of those of k, got {heads} and {key_heads}")


def other_length(op: str, queries: int, keys: int) -> ShapeError:
    return ShapeError(f"{op}: near blocks and causal attention need as many queries as keys, got {queries} and {keys}")


def left_over(op: str, groups: int, features: int) -> ConfigError:
    return ConfigError(f"{op}: {features} features do not fall into groups={groups}")


def unasked(op: str, name: str, because: str) -> ShapeError:
    return ShapeError(f"{op}: {name} must be left out: {because}")


def too_large(op: str, what: str, count: int, limit: int) -> ShapeError:
    return ShapeError(f"{op}: {what} would have {count} numbers, and the engine counts to {limit}")


def no_engine(reason: str) -> BackendError:
    return BackendError(f"cpu engine: cannot be used: {reason}; use backend='torch'")


def engine_cannot(op: str, backend: str, reason: str) -> ConfigError:
    return ConfigError(f"{op}: backend={backend!r} cannot be used: {reason}; backend='auto' falls back to torch")


def engine_failed(*, no_memory: bool) -> BackendError:
    cause = "there is not enough memory" if no_memory else "of an unexpected error"
    return BackendError(
        f"subquad: the native engine stopped because {cause}; use fewer or shorter sequences, or backend='torch'"
    )


def no_double_backward() -> BackendError:
    return BackendError(
        "subquad: second derivatives are not implemented in the fast engine; "
        "differentiate mechanism.reference(...) twice"
    )
