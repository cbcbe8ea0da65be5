"""Caches on disk: what a prompt has become, for another process."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad import files
from subquad.checks import serving as checks
from subquad.models import digests
from subquad.models.cache import SubquadCache
from subquad.serving.reader import Reader

FORMAT = 1  # of the files


def save_cache(model: Any, cache: SubquadCache, path: str | Path) -> None:
    """Writes what a cache holds to a file of safetensors, whole or not at all.

    The fingerprint of the model is in it, for which all weights are read once.

    Args:
        model: that has read the tokens.
        cache: of any number of sequences: from `read`, or `past_key_values` of an output.
        path: of the file.
    """
    from safetensors.torch import save_file

    reader = Reader("save_cache", model)
    checks.caches("save_cache", [cache], type(reader.new_cache()), len(reader.mechanisms))
    tensors = {"length": cache.length, "tokens": torch.tensor(cache.get_seq_length()), **_tensors(cache)}
    dense = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    said = {"format": FORMAT, "digest": digests.of_tensors(dense)}
    text = {"subquad_cache": json.dumps(said | {"model": digests.of_model(model)})}
    with checks.writable(path), files.written(path) as staging:
        save_file(dense, staging, text)


def load_cache(model: Any, path: str | Path) -> SubquadCache:
    """A cache that `save_cache` wrote for this model, on its device; the model reads one token to see what states are.

    Args:
        model: the same as then: another one, or other features, weights or dtypes, are an error.
        path: of the file.
    """
    from safetensors import safe_open

    reader = Reader("load_cache", model)
    with checks.cache_file(path), safe_open(path, "pt", device=str(reader.device)) as file:
        said = checks.said_of_cache(path, file.metadata(), FORMAT)
        checks.same_model(path, said["model"], digests.of_model(model))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        checks.same_digest(path, said["digest"], digests.of_tensors(tensors))
        cache = reader.new_cache()
        reader.read(cache, torch.zeros(1, 1, dtype=torch.int64, device=reader.device))
        for number, layer in enumerate(cache.layers):
            layer.state, layer.tokens = _filled(layer.state, f"{number}.", tensors), int(tensors["tokens"])
        cache.length = tensors["length"]
    return cache


def _tensors(cache: SubquadCache) -> dict[str, Tensor]:
    return {name: x for number, layer in enumerate(cache.layers) for name, x in _named(layer.state, f"{number}.")}


def _named(state: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a state by layer and field; of a layer with a convolution, one level deeper."""
    for field, part in zip(state._fields, state, strict=True):
        if isinstance(part, Tensor):
            yield prefix + field, part
        else:
            yield from _named(part, f"{prefix}{field}.")


def _filled(like: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """A state like another one, of these tensors."""
    return type(like)(
        *(
            tensors[prefix + field] if isinstance(part, Tensor) else _filled(part, f"{prefix}{field}.", tensors)
            for field, part in zip(like._fields, like, strict=True)
        )
    )
