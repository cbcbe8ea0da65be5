"""What features are measured on: synthetic heads, from easy to hard, and the heads of pretrained models.

Every input has sequences to fit features to and others to measure them on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.bench.real_heads import SOURCES, Sizes, load_model
from subquad.recording.calls import Call
from subquad.recording.record import Recording
from subquad.recording.stream import Batch

SYNTHETIC = ("small", "normal", "heavy")
REAL = tuple(SOURCES)
INPUTS = (*SYNTHETIC, *REAL)
SINKS = 4
NEAR = 32  # of the synthetic inputs


class LayerInput(NamedTuple):
    """What one layer is asked: batches to fit and batches to measure."""

    name: str
    fit: list[Call]
    test: list[Call]


class Input(NamedTuple):
    name: str
    title: str
    layers: list[LayerInput]
    near: int  # tokens of an exact block, where there are any


def load_input(name: str, *, layers: int = 0, quick: bool = False, sizes: Sizes | None = None, seed: int = 0) -> Input:
    """One of `INPUTS`. layers: of a real model, evenly spread; 0 for all. quick: fewer and shorter sequences."""
    if name in SYNTHETIC:
        return synthetic(name, length=128 if quick else 512, heads=4 if quick else 8, seed=seed)
    real = load_model(name, quick=quick, sizes=sizes)
    return model_input(real.name, real.title, real.model, real.fit, real.test, near=real.near, layers=layers)


def model_input(
    name: str, title: str, model: Any, fit: Sequence[Batch], test: Sequence[Batch], *, near: int, layers: int = 0
) -> Input:
    """What the attention of `model` is asked for the batches."""
    how = {"op": "bench fidelity", "exact": True}
    recording = Recording(model, test, **how)
    total = len(recording)
    places = range(total) if not layers or layers >= total else spread(layers, total)
    names = {recording.layers[place].name for place in places}
    tested = [layer for layer in recording if layer.name in names]
    fitted = Recording(model, fit, **how, wanted=lambda layer: layer.name in names)
    chosen = [LayerInput(a.name, a.calls, b.calls) for a, b in zip(fitted, tested, strict=True)]
    heads = sum(layer.test[0].q.shape[1] for layer in chosen)
    return Input(name, f"{title}: {heads} heads of {len(chosen)} layers", chosen, near)


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` places, the first and the last among them."""
    if count == 1:
        return [total // 2]
    return sorted({round(i * (total - 1) / (count - 1)) for i in range(count)})


# Synthetic heads ------------------------------------------------------------------------------------------------------

TITLES = {
    "small": "small norms: q, k ~ N(0, I / 8)",
    "normal": "q, k ~ N(0, I)",
    "heavy": "heavy-tailed: few directions, outlier tokens and channels",
}


def synthetic(name: str, *, length: int, heads: int, seed: int, head_dim: int = 64) -> Input:
    """Bidirectional, one layer. "small" and "normal" have values without any order, so that nothing averages out."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if name == "heavy":
        fit, test = heavy(heads, length, head_dim, generator)
    else:
        size = 8**-0.5 if name == "small" else 1.0  # |x| = 1 or 2.8 in 64 dimensions, after scaling
        fit, test = (_gaussian(heads, length, head_dim, size, generator) for _ in range(2))
    return Input(name, TITLES[name], [LayerInput(name, [fit], [test])], NEAR)


def _gaussian(heads: int, length: int, dim: int, size: float, generator: torch.Generator) -> Call:
    q, k, v = (torch.randn(1, heads, length, dim, generator=generator) for _ in range(3))
    return Call(q * size, k * size, v, causal=False, key_mask=None, scale=dim**-0.5)


def heavy(heads: int, length: int, dim: int, generator: torch.Generator) -> tuple[Call, Call]:
    """Two sequences of heads like those of trained models.

    Directions have a spectrum that falls like 1 / rank, tokens have sizes with Student's t of 5 degrees, keys and
    queries have means, three channels are five times as large, and values follow from keys, with noise.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spectrum = torch.arange(1, dim + 1) ** -1.0
    spectrum = spectrum * (dim / spectrum.square().sum()) ** 0.5  # q.k as large as that of N(0, I) would be
    channels = torch.ones(heads, 1, dim)
    for head in range(heads):
        channels[head, 0, torch.randperm(dim, generator=generator)[:3]] = 5.0
    turns = [torch.linalg.qr(draw(heads, dim, dim)).Q for _ in range(2)]
    turns[1] = turns[0] + 0.5 * (turns[1] - turns[0])  # queries and keys share some of their directions
    means = [0.5 * draw(heads, 1, dim) for _ in range(2)]
    values = draw(heads, dim, dim) / dim**0.5

    def tokens(which: int) -> Tensor:
        rows = draw(1, heads, length, dim) * spectrum @ turns[which].mT
        student = draw(1, heads, length, 1) / (draw(1, heads, length, 5).square().mean(-1, keepdim=True)).sqrt()
        return (rows * (0.5 + student.abs()) + means[which]) * channels**0.5 / 2

    def sequence() -> Call:
        q, k = tokens(0), tokens(1)
        return Call(q, k, k @ values + 0.5 * draw(1, heads, length, dim), False, None, dim**-0.5)

    return sequence(), sequence()
