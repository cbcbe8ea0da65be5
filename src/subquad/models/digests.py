"""Digests of models and tensors: what says, in a file, what its numbers belong to and that they are those written."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subquad.mechanism import outermost

# what a configuration says of files, of programs, or in other words than the mechanisms and weights themselves
BESIDE = (
    "_name_or_path",
    "architectures",
    "attention",
    "attention_options",
    "auto_map",
    "dtype",
    "transformers_version",
)


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        update(digest, name, tensors[name])
    return digest.hexdigest()


def of_model(model: Any) -> str:
    """Of all that decides its states: weights, mechanisms and their features, and what else the configuration says.

    It is the same after saving and loading the model, on every device. All weights are read for it.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in BESIDE}
    mechanisms = [(name, type(mechanism).__name__, repr(mechanism)) for name, mechanism in outermost(model)]
    said = [type(model).__name__, config, mechanisms]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    add_tensors(digest, model)
    return digest.hexdigest()


def add_tensors(digest: Any, model: nn.Module) -> None:
    """Weights and buffers, also those that are not saved."""
    for name, tensor in (*model.state_dict().items(), *model.named_buffers()):
        update(digest, name, tensor)


def update(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    if not isinstance(value, Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
