"""Feature maps of `favor` and `linear`: those that are given, and options that make them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.checks.options import choice, count, guess
from subquad.checks.tensors import shape_of, weights
from subquad.errors import BackendError, ConfigError, DtypeError, ShapeError


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


def proposal(given: Any, heads: int, dim: int, estimator: str) -> None:
    if estimator != "positive":
        raise ConfigError(f"favor: a proposal goes with estimator='positive', got {estimator!r}")
    shapes = (heads, dim), (heads, dim, dim)
    for name, tensor, shape in zip(("mean", "root"), given, shapes, strict=True):
        if tensor.shape != shape:
            raise ShapeError(f"favor: {name} of the proposal must be {list(shape)}, got {shape_of(tensor)}")


def coupling_dim(op: str, coupling: str, dim: int) -> None:
    """Head dims that a coupling cannot serve."""
    if coupling == "hadamard" and (dim & (dim - 1) or dim < 32):  # in few dimensions signs are too few: biased
        raise ConfigError(f"{op}: coupling='hadamard' needs a head_dim that is a power of two from 32 on, got {dim}")
    if coupling == "simplex" and dim < 2:
        raise ConfigError(f"{op}: coupling='simplex' needs a head_dim of at least 2, got {dim}")


# Errors to raise ------------------------------------------------------------------------------------------------------


def odd_hyperbolic(num_features: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='hyperbolic' uses every row with both signs, so num_features must be even, "
        f"got {num_features}"
    )


def odd_hedgehog(num_features: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='hedgehog' is a softmax of W x and one of -W x, so num_features must be even, "
        f"got {num_features}"
    )


def not_with_trigonometric(near: int, sinks: int) -> ConfigError:
    return ConfigError(
        "favor: estimator='trigonometric' has signed features, which cannot share a normaliser with exact weights; "
        f"use near=0, sinks=0, got near={near}, sinks={sinks}"
    )


def no_transform(estimator: str, gaussian: bool) -> ConfigError:
    if gaussian:
        return ConfigError("favor: transform=True leaves q.k as it is, but not the norms that kernel='gaussian' needs")
    return ConfigError(f"favor: transform=True needs estimator='calibrated', got {estimator!r}")


def renamed_estimator(old: str, new: str) -> str:
    return f"favor: estimator={old!r} is called {new!r} now; the old name still works and means the same"


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
