"""Every check of user input, and the only place that words its errors: what was asked, what came, what to do.

This file: tensors and options of mechanisms. Beside it: layers, models, data, runs.

Functions above the last heading raise if the thing they are named after is wrong; those below it build an error.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from subquad.errors import BackendError, ConfigError, DtypeError, MaskError, ShapeError, SubquadError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STRIDED = torch.strided


def shape_of(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Tensors --------------------------------------------------------------------------------------------------------------


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


def feature_map(op: str, map: Any, q: Tensor, k: Tensor) -> None:
    if not hasattr(map, "key_bias"):
        raise DtypeError(f"{op}: feature_map must be a subquad.FeatureMap, got {type(map).__name__}")
    choice(op, "the rule of the feature map", map.rule, ("none", "norm", "groups"))
    count(op, "groups of the feature map", map.groups)
    for name in ("query", "key", "key_bias", "offset_weight", "offset_bias"):
        if getattr(map, name) is not None or not name.startswith("offset"):
            weights(op, f"{name} of the feature map", getattr(map, name))
    if map.query.dim() != 3:
        raise ShapeError(f"{op}: query of the feature map must be [heads, features, dim], got {shape_of(map.query)}")
    map_rows(op, map.query, q, k)
    heads, features = map.query.shape[0], map.query.shape[-2]
    wanted = {"key": tuple(map.query.shape), "key_bias": (heads, features)}
    if map.offset_weight is not None or map.offset_bias is not None:
        wanted |= {"offset_weight": (heads, q.shape[-1]), "offset_bias": (heads,)}
    for name, shape in wanted.items():
        tensor = getattr(map, name)
        if tensor is None or tensor.shape != shape:
            got = "None" if tensor is None else shape_of(tensor)
            raise ShapeError(f"{op}: {name} of the feature map must be {list(shape)} like its query weights, got {got}")
    if map.groups != 1 and (map.rule != "groups" or features % map.groups):
        raise ConfigError(
            f"{op}: groups={map.groups} of the feature map needs rule='groups' and a multiple of {map.groups} "
            f"features, got rule={map.rule!r} and {features}"
        )
    for device in {getattr(map, name).device for name in wanted} - {q.device}:
        raise BackendError(f"{op}: the feature map is on {device}, q on {q.device}; move one of them")


def map_rows(op: str, rows: Tensor, q: Tensor, k: Tensor) -> None:
    """Rows of a feature map `[heads, M, D]`, for such queries and keys."""
    if rows.shape[-1] != q.shape[-1]:
        raise ShapeError(f"{op}: the feature map is for head_dim={rows.shape[-1]}, got q {shape_of(q)}")
    heads = rows.shape[0]
    if heads != 1 and heads not in (k.shape[1], q.shape[1]):
        raise ShapeError(
            f"{op}: the feature map has {heads} heads, but k has {k.shape[1]} and q {q.shape[1]}; "
            "make it with num_heads = the heads of k"
        )
    if rows.device != q.device:
        raise BackendError(f"{op}: the feature map is on {rows.device}, q on {q.device}; move one of them")


def weights(op: str, name: str, tensor: Any) -> None:
    """Numbers of any precision."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    dense_layout(op, name, tensor)
    if tensor.dtype not in FLOAT_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
        raise DtypeError(f"{op}: {name} must be one of {names}, got {dtype_name(tensor.dtype)}")
    if 0 in tensor.shape:
        raise ShapeError(f"{op}: {name} must have no empty dimension, got {shape_of(tensor)}")


def features_of(op: str, phi: Any, x: Tensor) -> Tensor:
    """What a user's feature map made of x: one vector per token."""
    if not isinstance(phi, Tensor) or phi.shape[:-1] != x.shape[:-1]:
        got = shape_of(phi) if isinstance(phi, Tensor) else type(phi).__name__
        raise ShapeError(
            f"{op}: feature_map must map {shape_of(x)} to [{', '.join(map(str, x.shape[:-1]))}, M], got {got}"
        )
    return phi


def features_of_state(op: str, far_sum: Tensor, features: int) -> None:
    """A function's features are known when it was called, not before."""
    if far_sum.shape[2] != features:
        raise ShapeError(f"{op}: state.far_sum is of {far_sum.shape[2]} features, but feature_map returned {features}")


def proposal(given: Any, heads: int, dim: int, estimator: str) -> None:
    if estimator != "positive":
        raise ConfigError(f"favor: a proposal goes with estimator='positive', got {estimator!r}")
    shapes = (heads, dim), (heads, dim, dim)
    for name, tensor, shape in zip(("mean", "root"), given, shapes, strict=True):
        if tensor.shape != shape:
            raise ShapeError(f"favor: {name} of the proposal must be {list(shape)}, got {shape_of(tensor)}")


def projection(op: str, weight: Tensor, k: Tensor) -> None:
    weights(op, "the projection", weight)
    if weight.dim() != 3 or weight.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"{op}: the projection must be [1 or {k.shape[1]}, features, {k.shape[-1]}], got {shape_of(weight)}"
        )
    if weight.shape[0] not in (1, k.shape[1]):
        raise ShapeError(
            f"{op}: the projection has {weight.shape[0]} heads, but k has {k.shape[1]}; "
            "make it with num_heads = the heads of k"
        )
    if weight.device != k.device:
        raise BackendError(f"{op}: the projection is on {weight.device}, k on {k.device}; move one of them")


def forward(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask_: Tensor | None) -> None:
    """What every mechanism's forward asks of its inputs."""
    qkv(mechanism.name, q, k, v)
    _common(mechanism, q, k, causal, key_mask_)


def matrix(mechanism: Any, q: Tensor, k: Tensor, causal: bool, key_mask_: Tensor | None, rows_: Tensor | None) -> None:
    qk(mechanism.name, q, k)
    _common(mechanism, q, k, causal, key_mask_)
    rows(mechanism.name, rows_, q)


def extend(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, key_mask_: Tensor | None) -> None:
    qkv(mechanism.name, q, k, v)
    if not mechanism.supports_state:
        raise cannot_extend(mechanism.name)
    head_dim(mechanism.name, mechanism.head_dim, q)
    extend_lengths(mechanism.name, q, k)
    key_mask(mechanism.name, key_mask_, k)
    mechanism.check_heads(q, k)


def _common(mechanism: Any, q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> None:
    head_dim(mechanism.name, mechanism.head_dim, q)
    if causal and not mechanism.supports_causal:
        raise ConfigError(f"{mechanism.name}: cannot be causal, {mechanism.why_not_causal}; use causal=False")
    causal_lengths(mechanism.name, causal, q, k)
    if mechanism.positional:
        self_attention(mechanism.name, q, k, mechanism.cross_attention_advice)
    key_mask(mechanism.name, mask, k)
    if mechanism.mask_kinds == ("right",):
        right_padding(mechanism.name, mask)
    mechanism.check_heads(q, k)


# Options --------------------------------------------------------------------------------------------------------------


def count(op: str, name: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{op}: {name} must be a whole number of at least {minimum}, got {value!r}")
    return value


def optional_count(op: str, name: str, value: Any, minimum: int = 1) -> int | None:
    return None if value is None else count(op, name, value, minimum)


def seed(op: str, value: Any) -> int:
    if count(op, "seed", value, minimum=0) >= 2**32:
        raise ConfigError(f"{op}: seed must be below 2**32, got {value}")
    return value


def scale(op: str, value: Any, head_dim: int) -> float:
    """The given scale, or 1/sqrt(head_dim)."""
    if value is None:
        return head_dim**-0.5
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{op}: scale must be a positive finite number, got {value!r}")
    return float(value)


def choice(op: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{op}: {name} must be one of {', '.join(choices)}, got {value!r}{guess(value, choices)}")


def engine_cannot(op: str, backend: str, reason: str) -> ConfigError:
    return ConfigError(f"{op}: backend={backend!r} cannot be used: {reason}; backend='auto' falls back to torch")


def probability(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{op}: {name} must be at least 0 and below 1, got {value!r}")
    return float(value)


def coupling_dim(op: str, coupling: str, dim: int) -> None:
    """Head dims that a coupling cannot serve."""
    if coupling == "hadamard" and (dim & (dim - 1) or dim < 32):  # in few dimensions signs are too few: biased
        raise ConfigError(f"{op}: coupling='hadamard' needs a head_dim that is a power of two from 32 on, got {dim}")
    if coupling == "simplex" and dim < 2:
        raise ConfigError(f"{op}: coupling='simplex' needs a head_dim of at least 2, got {dim}")


def mechanism_name(name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"unknown attention {name!r}{guess(name, known)}; known: {', '.join(known)}")


def option_names(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    for option in given:
        if option not in known:
            raise ConfigError(f"{name}: unknown option {option!r}{guess(option, known)}; options: {', '.join(known)}")


def guess(value: Any, known: Sequence[str]) -> str:
    longer = [name for name in known if name.startswith(str(value))]
    near = longer or difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def needs(package: str, option: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{option}: needs the package {package}; pip install {package}") from error


# Errors to raise ------------------------------------------------------------------------------------------------------


def cannot_extend(op: str) -> ConfigError:
    return ConfigError(f"{op}: cannot extend a sequence, it has no state; use forward on the whole")


def odd_hyperbolic(num_features: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='hyperbolic' uses every row with both signs, so num_features must be even, "
        f"got {num_features}"
    )


def not_with_trigonometric(near: int, sinks: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='trigonometric' has signed features, which cannot share a normaliser with exact weights; "
        f"use near=0, sinks=0, got near={near}, sinks={sinks}"
    )


def renamed_estimator(old: str, new: str) -> str:
    return f"favor: estimator={old!r} is called {new!r} now; the old name still works and means the same"


def odd_hedgehog(num_features: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='hedgehog' is a softmax of W x and one of -W x, so num_features must be even, "
        f"got {num_features}"
    )


def no_transform(estimator: str, gaussian: bool) -> ConfigError:
    if gaussian:
        return ConfigError("favor: transform=True leaves q.k as it is, but not the norms that kernel='gaussian' needs")
    return ConfigError(f"favor: transform=True needs estimator='calibrated', got {estimator!r}")


def learned_features_stay(estimator: str) -> ConfigError:
    return ConfigError(f"favor: estimator={estimator!r} is learned, there is nothing to redraw; use subquad.calibrate")


def not_calibrated(estimator: str) -> str:
    return (
        f"favor: estimator={estimator!r} is not fitted to data yet and assumes q, k ~ N(0, I); "
        "use subquad.calibrate(model, batches)"
    )


def only_with_projection(option: str) -> ConfigError:
    return ConfigError(f"linear: {option} belongs to the random projection; give num_features too, or leave it out")


def nothing_to_redraw() -> ConfigError:
    return ConfigError("linear: nothing to redraw without a random projection; give num_features")


def not_a_feature_map(value: Any, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"linear: feature_map must be one of {', '.join(known)} or a function of a tensor, "
        f"got {value!r}{guess(value, known)}"
    )


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


def no_transforms(*tensors: Tensor | None) -> None:
    """The operators have gradients for torch.autograd; under other transforms torch would silently return zeros."""
    if torch.compiler.is_compiling():
        return
    if transformed() or (forward_mode() and any(_is_dual(t) for t in tensors)):
        raise BackendError(
            "subquad: torch.func transforms (vmap, grad, jvp) and forward-mode derivatives are not supported by the "
            "fast engine; fold a mapped dimension into the batch, use torch.autograd.grad, or mechanism.reference(...)"
        )
