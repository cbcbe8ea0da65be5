"""Time of one layer's attention, all rows of a table taking turns."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

import subquad


def attention_seconds(
    rows: Mapping[str, tuple[str, dict[str, Any]]], shape: tuple[int, int, int, int], repeats: int = 7
) -> dict[str, float]:
    """Causal, forward and backward, the best of the turns. rows: mechanisms and options; shape `[B, H, T, D]`."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    layers = {name: subquad.attention(kind, head_dim=shape[-1], **given) for name, (kind, given) in rows.items()}
    best = dict.fromkeys(layers, math.inf)
    for _ in range(repeats):
        for name, layer in layers.items():
            begun = time.perf_counter()
            layer(q, k, v, causal=True).sum().backward()
            best[name] = min(best[name], time.perf_counter() - begun)
    return best
