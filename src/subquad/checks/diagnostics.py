"""Checks of `subquad.diagnostics`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.checks import choice, count, seed, shape_of
from subquad.errors import ConfigError, DataError, DtypeError, MaskError, ShapeError


def batch(inputs: Mapping[str, Any]) -> Tensor:
    """Which tokens are real, bool `[B, T]`; all inputs are `[B, T, ...]`."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise DtypeError(f"spectrum: {name} of the batch must be a torch.Tensor, got {type(value).__name__}")
    first = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    if first is None:
        raise ConfigError(f"spectrum: the batch needs input_ids or inputs_embeds, got {', '.join(inputs) or 'nothing'}")
    for name, value in inputs.items():
        if value.dim() < 2 or value.shape[:2] != first.shape[:2] or 0 in value.shape:
            raise ShapeError(
                "spectrum: every input must be [batch, length] like input_ids, none empty, "
                f"got {name} {shape_of(value)}"
            )
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise MaskError("spectrum: attention_mask must be [batch, length], 1 for real tokens and 0 for padding")
    return mask.bool()


def one_length(real: Tensor, length: int | None) -> int:
    """Real tokens to take of each sequence: spectra of different lengths have no mean."""
    shortest, longest = (int(x) for x in real.sum(-1).aminmax())
    if length is not None:
        if count("spectrum", "length", length) > shortest:
            raise ShapeError(f"spectrum: length={length}, but a sequence has {shortest} real tokens; leave it out")
        return length
    if shortest != longest or not shortest:
        raise ShapeError(
            f"spectrum: sequences must have one length, got {shortest} to {longest} real tokens; "
            "give length to take the first ones of each"
        )
    return shortest


def shows_attention(model: Any) -> None:
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"spectrum: {type(model).__name__} has no subquad mechanism and is no Hugging Face model, "
            "so there is no attention to look at"
        )


def given_matrices(found: Sequence[Tensor | None] | None, model: Any) -> list[Tensor]:
    matrices = [weights for weights in found or () if weights is not None]
    if not matrices:
        raise ConfigError(
            f"spectrum: {type(model).__name__} returns no attention weights; of an encoder-decoder give one half, "
            "such as model.get_encoder()"
        )
    return matrices


def alike(matrices: Sequence[Tensor]) -> None:
    shapes = sorted({tuple(matrix.shape) for matrix in matrices})
    if len(shapes) != 1:
        raise ShapeError(f"spectrum: all layers must have matrices of one shape [heads, n, n], got {shapes}")


def rank(value: Any, length: int) -> None:
    if count("spectrum", "rank", value) > length:
        raise ConfigError(f"spectrum: rank must be at most the length of {length}, got {value}")


def share(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"spectrum: share must be above 0 and at most 1, got {value!r}")


def diagnose_settings(given: Any, estimators: Sequence[str]) -> None:
    op = "diagnose"
    count(op, "rows", given.rows)
    tolerance = given.tolerance
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise ConfigError(f"{op}: tolerance must lie between 0 and 1, got {tolerance!r}")
    choice(op, "estimator", given.estimator, estimators)
    seed(op, given.seed)


def options_are_used(mechanisms: Sequence[Any], favor: type, options: Mapping[str, Any]) -> None:
    """Nothing that is given is ignored."""
    if options and all(isinstance(mechanism, favor) for mechanism in mechanisms):
        raise ConfigError(
            f"diagnose: {', '.join(options)} is for layers with exact attention, but all of these are FAVOR and are "
            "judged as they are; leave it out"
        )


@contextmanager
def writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    except ValueError as error:  # matplotlib's, for a suffix that it does not know
        raise DataError(f"{path}: cannot be written ({error})") from error


# Of the command -------------------------------------------------------------------------------------------------------


def enough_tokens(kept: int, given: int, length: int) -> None:
    if not kept:
        raise DataError(f"spectrum: none of {given} sequences has {length} tokens; give a smaller --length")
