"""Causal models of every kind that can be served, small enough for float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.conversion import swap_attention
from subquad.models import SubquadCache
from tiny_heads import gpt2, llama
from tiny_models import NARROW, favor_and_softmax, make

MECHANISMS = ("favor", "linear", "window", "softmax", "pages", "mixed", "strided", "lsh", "cluster")
SWAPPED: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def ours(name: str, **options: Any) -> Any:
    return make(attention=name, attention_options=NARROW.get(name, {}), eos_token_id=None, stir=True, **options)


def two_kinds() -> Any:
    layers = {"attention": ["window", "softmax"], "attention_options": [NARROW["window"], {}]}
    return make(**layers, short_conv=2, qk_norm=True, eos_token_id=None, stir=True)


def swapped(family: str, name: str) -> Any:
    options = favor_and_softmax(2 if family == "llama" else 4) if name == "mixed" else NARROW.get(name, {})
    return swap_attention(SWAPPED[family](**NO_END), name, **options)


MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(ours, name) for name in MECHANISMS},
    "short_conv": partial(ours, "favor", short_conv=3),
    "learned": partial(ours, "linear", positions="learned", max_position_embeddings=64),
    "two kinds": two_kinds,
    "reversible": partial(ours, "favor", reversible=True),
    **{f"{family} {name}": partial(swapped, family, name) for family in SWAPPED for name in MECHANISMS},
}


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 23, (length,), generator=torch.Generator().manual_seed(seed))


def lengths(cache: SubquadCache) -> list[int]:
    """Real tokens of each sequence."""
    return [] if cache.length is None else cache.length.tolist()


def alone(model: Any, ids: Tensor, new: int, **options: Any) -> list[int]:
    """What `generate` continues a prompt `[T]` with."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], **options)[0, len(ids) :].tolist()
