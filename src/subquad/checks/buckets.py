"""Checks of `lsh` and `cluster`."""

from torch import Tensor

from subquad.checks import count, shape_of, weights
from subquad.errors import BackendError, ConfigError, ShapeError

MOST_BUCKETS = 2**24


def num_buckets(num_buckets: int, hashes: int) -> int:
    """Directions per hash: each is two buckets, and a round has the product of its hashes' buckets."""
    count("lsh", "num_buckets", num_buckets, minimum=2)
    count("lsh", "hashes", hashes)
    not_too_many(num_buckets)
    per_hash = round(num_buckets ** (1 / hashes))
    if per_hash % 2 or per_hash**hashes != num_buckets:
        wanted = "an even number" if hashes == 1 else f"an even number to the power of hashes={hashes}"
        raise ConfigError(f"lsh: num_buckets must be {wanted}, got {num_buckets}")
    return per_hash // 2


def not_too_many(num_buckets: int) -> None:
    """Every sequence, head and round has a number for each of them."""
    if num_buckets > MOST_BUCKETS:
        raise ConfigError(f"lsh: num_buckets must be at most {MOST_BUCKETS}, got {num_buckets}")


def per_head(op: str, what: str, weight: Tensor, layout: str, k: Tensor) -> None:
    """Vectors for all heads or for each head of k. `layout` names the dims between heads and the last."""
    weights(op, f"the {what}", weight)
    dims = layout.split(", ")
    if weight.dim() != len(dims) + 2 or weight.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"{op}: the {what} must be [1 or {k.shape[1]}, {layout}, {k.shape[-1]}], got {shape_of(weight)}"
        )
    if weight.shape[0] not in (1, k.shape[1]):
        raise ShapeError(
            f"{op}: the {what} have {weight.shape[0]} heads, but k has {k.shape[1]}; "
            "make them with num_heads = the heads of k"
        )
    if weight.device != k.device:
        raise BackendError(f"{op}: the {what} are on {weight.device}, k on {k.device}; move one of them")


def nothing_to_redraw() -> ConfigError:
    return ConfigError("cluster: centroids are learned, there is nothing to redraw; use update(q, k)")


def inside_options(inside: str, bucket_size: int | None, num_features: int | None) -> None:
    """Blocks belong to exact attention, features to FAVOR."""
    given = {"exact": ("num_features", num_features), "favor": ("bucket_size", bucket_size)}
    option, value = given[inside]
    if value is not None:
        other = "favor" if inside == "exact" else "exact"
        raise ConfigError(f"cluster: {option} belongs to inside={other!r}; leave it out with inside={inside!r}")
