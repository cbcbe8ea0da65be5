"""Checks of `linformer`: options that go together, matrices, lengths."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.checks import FLOAT_DTYPES, choice, shape_of
from subquad.errors import BackendError, ConfigError, DtypeError, ShapeError

OP = "linformer"


def options(projection: str, sharing: str | None, num_heads: int | None, seed: int | None) -> None:
    """Options that say something about others which are not there."""
    if sharing is not None and projection == "mean":
        raise ConfigError(f"{OP}: projection='mean' has no matrices to share; leave sharing={sharing!r} out")
    if sharing == "none" and num_heads is None:
        raise ConfigError(f"{OP}: sharing='none' has projections for each head; give num_heads = the heads of k")
    if sharing == "layerwise" and projection == "gaussian":
        raise ConfigError(
            f"{OP}: sharing='layerwise' ties what layers learn, projection='gaussian' is drawn for each layer; "
            "use sharing='key_value'"
        )
    if seed is not None and projection != "gaussian":
        raise ConfigError(f"{OP}: seed draws projection='gaussian', got projection={projection!r}; leave it out")


def whole_blocks(projection: str, rank: int, max_length: int) -> None:
    if max_length % rank:
        raise ConfigError(
            f"{OP}: projection={projection!r} has blocks of max_length / rank tokens, so max_length must be a multiple "
            f"of rank, got {max_length} and {rank}"
        )


def no_scale_in_linear(scale: Any) -> None:
    if scale is not None:
        raise ConfigError(f"{OP}: kernel='linear' has no logits to scale; leave scale={scale!r} out")


def length(max_length: int, k: Tensor) -> None:
    if k.shape[2] > max_length:
        raise ShapeError(
            f"{OP}: made for at most max_length={max_length} keys, got {k.shape[2]}; "
            "make it with a larger max_length, or cut the sequence"
        )


def heads(num_heads: int | None, k: Tensor) -> None:
    if num_heads is not None and k.shape[1] != num_heads:
        raise ShapeError(f"{OP}: made for num_heads={num_heads} heads of k, got {k.shape[1]}")


def matrices(e: Any, f: Any, k: Tensor) -> None:
    """E and F of the function, `[rank, N]` or `[1 or K, rank, N]`, N at least as long as the keys."""
    for name, matrix in (("e", e), ("f", f)):
        if not isinstance(matrix, Tensor) or matrix.dtype not in FLOAT_DTYPES:
            got = str(matrix.dtype).removeprefix("torch.") if isinstance(matrix, Tensor) else type(matrix).__name__
            raise DtypeError(f"{OP}: {name} must be a floating-point tensor, got {got}")
        stacked = matrix.dim() == 3 and matrix.shape[0] in (1, k.shape[1])
        if not (stacked or matrix.dim() == 2) or 0 in matrix.shape:
            raise ShapeError(
                f"{OP}: {name} must be [rank, max_length] or [1 or {k.shape[1]}, rank, max_length], "
                f"got {shape_of(matrix)}"
            )
        if matrix.device != k.device:
            raise BackendError(f"{OP}: {name} is on {matrix.device}, k on {k.device}; move one of them")
        length(matrix.shape[-1], k)
    if e.shape[-2] != f.shape[-2]:
        raise ShapeError(f"{OP}: e and f must have the same rank, got {shape_of(e)} and {shape_of(f)}")


def choices(**chosen: tuple[str, Sequence[str]]) -> None:
    for name, (value, known) in chosen.items():
        choice(OP, name, value, known)


# Errors to raise ------------------------------------------------------------------------------------------------------


def no_max_length() -> ConfigError:
    return ConfigError(f"{OP}: needs max_length, the longest sequence its projections are made for")


def nothing_to_redraw(projection: str) -> ConfigError:
    return ConfigError(f"{OP}: nothing to redraw with projection={projection!r}; only 'gaussian' is drawn")
