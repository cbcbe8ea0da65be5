"""Checks of `subquad.serving`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.checks import count, shape_of
from subquad.checks import seed as seed_number
from subquad.errors import ConfigError, DataError, DtypeError, ShapeError, SubquadError


def causal_model(op: str, model: Any, has_mechanisms: bool) -> None:
    """has_mechanisms: it is one of ours, or its attention was swapped."""
    if not has_mechanisms or getattr(model, "generation_config", None) is None:
        raise ConfigError(
            f"{op}: {type(model).__name__} does not generate with states; give a SubquadForCausalLM, or a causal model "
            "of transformers after swap_attention"
        )


def evaluating(op: str, model: Any) -> None:
    if model.training:
        raise ConfigError(f"{op}: {type(model).__name__} is in training mode; call model.eval() first")


def keep_states(op: str, mechanisms: Sequence[Any]) -> None:
    for layer, mechanism in enumerate(mechanisms):
        if not mechanism.supports_state:
            raise ConfigError(
                f"{op}: {mechanism.name} (layer {layer}) keeps no state, so its model reads every sequence anew for "
                "each token; use another attention, or model.generate(..., use_cache=False)"
            )


def takes_positions(op: str, model: Any, parameters: Mapping[str, Any]) -> None:
    if "position_ids" not in parameters:
        raise ConfigError(
            f"{op}: {type(model).__name__} takes no position_ids, so sequences of one batch cannot be at different "
            "positions; use model.generate"
        )


def joinable(op: str, mechanisms: Sequence[Any]) -> None:
    for layer, mechanism in enumerate(mechanisms):
        if not mechanism.supports_join:
            raise ConfigError(
                f"{op}: {mechanism.name} (layer {layer}) cannot join the states of sequences of different lengths; "
                "give it a join_states, or use model.generate"
            )


def caches(op: str, given: Any, kind: type, layers: int) -> None:
    """That they are caches of such a model, and have read something."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"{op}: caches must be a list of at least one, got {given!r}")
    for cache in given:
        if type(cache) is not kind:
            raise DtypeError(f"{op}: cache must be a {kind.__name__}, as this model has, got {type(cache).__name__}")
        if len(cache.layers) != layers:
            raise ShapeError(f"{op}: the cache has {len(cache.layers)} layers, the model {layers}")
        if cache.length is None:
            raise ConfigError(f"{op}: the cache is empty; read(model, ids) makes one that is not")


def prefix(cache: Any, kind: type, layers: int) -> None:
    caches("submit: prefix", [cache], kind, layers)
    if len(cache.length) != 1:
        raise ShapeError(
            f"submit: prefix must be a cache of one sequence, got {len(cache.length)}; cache.select([row]) takes one"
        )


def prompt(op: str, given: Any, vocabulary: int, *, rows: bool) -> Tensor:
    """Ids int64 `[B, T]`, on the CPU. rows: there may be several."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{op}: a prompt must be token ids, got {given!r}") from error
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or 0 in ids.shape or (len(ids) > 1 and not rows):
        wanted = "[T] or [B, T]" if rows else "[T]"
        raise ShapeError(f"{op}: a prompt must be token ids {wanted}, at least one, got {shape_of(ids)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise DtypeError(f"{op}: token ids must be whole numbers, got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ConfigError(f"{op}: token ids must lie between 0 and {vocabulary - 1}, got {wrong}")
    return ids.detach().to("cpu", torch.int64)


def sampling(temperature: Any, top_k: Any, top_p: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    if temperature is None:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            if value is not None:
                raise ConfigError(f"submit: {name}={value!r} is for sampling; give a temperature, too, or leave it out")
    elif not _number(temperature) or not 0.01 <= temperature <= 100:
        raise ConfigError(
            f"submit: temperature must lie between 0.01 and 100, got {temperature!r}; leave it out for the "
            "likeliest token"
        )
    if top_k is not None:
        count("submit", "top_k", top_k)
    if top_p is not None and not (_number(top_p) and 0 < top_p <= 1):
        raise ConfigError(f"submit: top_p must lie above 0 and at most at 1, got {top_p!r}")
    if seed is not None:
        seed_number("submit", seed)
    return temperature, top_k, top_p, seed


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def ends(given: Any) -> frozenset[int]:
    """Tokens that end a sequence."""
    several = given if isinstance(given, (list, tuple, set, frozenset)) else [] if given is None else [given]
    return frozenset(count("submit", "every eos_token_id", token, minimum=0) for token in several)


def prompt_fits(op: str, prompt: int, longest: int | None) -> None:
    if longest is not None and prompt > longest:
        raise ConfigError(f"{op}: the model reads at most {longest} tokens, got {prompt}; give a shorter prompt")


def short_enough(past: int, prompt: int, new: int, longest: int | None) -> None:
    """The last token is not read."""
    total = past + prompt + new - 1
    if longest is not None and total > longest:
        before = f"{past} of the prefix, " if past else ""
        raise ConfigError(
            f"submit: the model reads at most {longest} tokens, but there are {before}{prompt} of the prompt and "
            f"{new} new ones; ask for fewer"
        )


# Files ----------------------------------------------------------------------------------------------------------------


@contextmanager
def writable(path: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"save_cache: {path} cannot be written ({error.strerror or error})") from error


@contextmanager
def cache_file(path: Any) -> Iterator[None]:
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        yield
    except SubquadError:
        raise
    except Exception as error:  # safetensors has an error of its own for each kind of damage
        raise damaged(path, str(error)) from error


def damaged(path: Any, why: str) -> DataError:
    return DataError(f"{path}: is damaged ({why}); save_cache makes it again")


def said_of_cache(path: Any, metadata: Mapping[str, str] | None, known: int) -> dict[str, Any]:
    """What is in the header of the file."""
    text = (metadata or {}).get("subquad_cache")
    if text is None:
        raise DataError(f"{path}: is not a cache that save_cache wrote")
    said = json.loads(text)
    if said["format"] != known:
        raise DataError(f"{path}: is of format {said['format']}, this version reads format {known}; save it again")
    return said


def same_model(path: Any, kept: Any, now: str) -> None:
    if kept != now:
        raise ConfigError(
            f"{path}: is the cache of another model: weights, dtype, mechanisms or their features differ; load the "
            "model that it was saved with, or read the prompt again"
        )


def same_digest(path: Any, kept: Any, now: str) -> None:
    if kept != now:
        raise damaged(path, "its numbers are not those that were written")
