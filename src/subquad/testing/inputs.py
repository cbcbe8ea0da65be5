"""Inputs for the contract suite, and the measures it judges by."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.mechanism import Mechanism

VALUE_DIM = 5
QUERY_HEADS_PER_KEY_HEAD = 2


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(t.to(dtype) for t in self))

    def tokens(self, start: int, stop: int) -> "Inputs":
        return Inputs(*(t[:, :, start:stop] for t in self))

    def sequence(self, index: int) -> "Inputs":
        return Inputs(*(t[index : index + 1] for t in self))

    def leaves(self) -> "Inputs":
        """Copies that collect gradients."""
        return Inputs(*(t.detach().clone().requires_grad_() for t in self))


def make_inputs(
    mechanism: Mechanism,
    length: int,
    *,
    batch: int = 2,
    keys: int | None = None,
    size: float = 1.0,
    seed: int = 0,
) -> Inputs:
    """Independent normal q, k, v in float64, with fewer key heads than query heads and another value dim."""
    generator = torch.Generator().manual_seed(seed)
    key_heads = getattr(mechanism, "key_heads", None) or getattr(mechanism, "num_heads", None) or 2
    size = size if mechanism.convex else 0.3 * size  # signed features are meant for small inputs
    keys = keys or length

    def draw(heads: int, tokens: int, dim: int, scale: float) -> Tensor:
        return scale * torch.randn(batch, heads, tokens, dim, generator=generator, dtype=torch.float64)

    return Inputs(
        draw(QUERY_HEADS_PER_KEY_HEAD * key_heads, length, mechanism.head_dim, size),
        draw(key_heads, keys, mechanism.head_dim, size),
        draw(key_heads, keys, VALUE_DIM, 1.0),
    )


def make_mask(length: int, kind: str) -> Tensor:
    """`[3, length]`: "right" and "left" padding of three lengths (full, some, one), or "holes" anywhere."""
    lengths = torch.tensor([length, max(1, length // 2), 1])[:, None]
    position = torch.arange(length)[None]
    if kind == "right":
        return position < lengths
    if kind == "left":
        return position >= length - lengths
    mask = torch.rand(3, length, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, length // 2] = True
    return mask


def relative_error(got: Tensor, want: Tensor, size: float = 0.0) -> float:
    """Norm of the difference over the norm of what is wanted, or `size` if that is more; NaN never passes for small."""
    got, want = got.detach().double(), want.detach().double()
    if not bool(got.isfinite().all()):
        return float("inf")
    size = max(size, want.norm().item())
    difference = (got - want).norm().item()
    return difference / size if size else difference


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "result", size: float = 0.0) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    error = relative_error(got, want, size)
    assert error <= tolerance, f"{what}: relative error {error:.1e} is above {tolerance:.0e}"


def gradients(out: Tensor, inputs: Sequence[Tensor], seed: int = 7) -> tuple[Tensor, ...]:
    """Gradients of a random linear functional of `out`; zeros for what it does not depend on."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    if not out.requires_grad:
        return tuple(torch.zeros_like(t) for t in inputs)
    return torch.autograd.grad(out, inputs, direction, allow_unused=True, materialize_grads=True)
