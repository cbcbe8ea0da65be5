"""One attention problem as the C++ engine wants it."""

import math
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.cpu import library
from subquad.kernels.cpu.library import DTYPES, Array, Library, Problem, array, dense_rows, pointer

TILE = 64  # as in tokens.hpp
RULES = ("none", "norm", "groups")
KINDS = ("exp", "elu1", "relu", "softplus", "relu2", "identity")
SMALLEST_SLICE = 16  # features: fewer would leave vectors half empty


def engine() -> Library:
    assert isinstance(library.LOADED, Library), library.LOADED  # `choose_engine` asked first
    return library.LOADED


def block_size(near: int, chunk: int, length: int) -> int:
    """Tokens per block. A near block longer than the sequence is the sequence."""
    return min(near, max(length, 1)) if near else min(chunk or TILE, TILE)


def blocks_per_segment(block: int, num_features: int) -> int:
    """A state is kept every so many blocks: a state is M x V numbers, so that 4 M tokens apart they are fewer than the
    values. The backward keeps a state per block of a segment, hence not too many."""
    return min(64, max(1, 4 * num_features // block))


def border_count(length: int, block: int, num_features: int) -> int:
    return -(-length // (block * blocks_per_segment(block, num_features)))


def parts_per_head(heads: int) -> int:
    """Parts that heads are cut into, so that every thread has as much to do as the others."""
    threads = torch.get_num_threads()
    return 1 if heads >= 4 * threads else threads // math.gcd(heads, threads)


def make_problem(q: Tensor, k: Tensor, v: Tensor, keep: list[Tensor], **fields: Any) -> Problem:
    """`keep` holds what must outlive the call. Fields that are not given are zero."""
    q, k, v = tensors = [dense_rows(t) for t in (q, k, v)]
    keep += tensors
    values: dict[str, Any] = {
        "dtype": DTYPES[q.dtype],
        "batch": q.shape[0],
        "key_heads": k.shape[1],
        "groups": q.shape[1] // k.shape[1],
        "map_heads": 1,
        "rule_groups": 1,
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "mask_batch": 1,
        "blocks_per_segment": 1,
        "slices": 1,
        "stretches": 1,
        "tile": TILE,
        "threads": torch.get_num_threads(),
        "length": q.shape[2],
        "key_length": k.shape[2],
        **{"q": array(q), "k": array(k), "v": array(v)},
    }
    values |= fields
    for name, value in values.items():
        if isinstance(value, Tensor):
            keep.append(value)
            values[name] = pointer(value)
    return Problem(**{name: value for name, value in values.items() if value is not None})


def float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def mask(tensor: Tensor | None, batch: int) -> Tensor | None:
    """One row for all sequences, or one for each."""
    if tensor is None:
        return None
    return tensor.expand(batch if batch > 1 else tensor.shape[0], -1).contiguous()


def rows(tensor: Tensor, keep: list[Tensor]) -> Array:
    keep.append(dense_rows(tensor))
    return array(keep[-1])
