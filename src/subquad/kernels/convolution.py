"""A convolution over neighbouring tokens, one filter per channel, with its gradients: in C++, or in torch.

torch's own depthwise convolution is up to five times slower on CPUs in this layout.

Letters: B batch, T tokens, E channels, W taps.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad import checks
from subquad.errors import SubquadError
from subquad.kernels.cpu import call, gate, library
from subquad.kernels.cpu.convolution import convolution_plan, convolution_step_plan

TILE = 1 << 16  # numbers done at once in torch: every tap finds its tile in the cache


def convolve(x: Tensor, taps: Tensor, *, causal: bool) -> Tensor:
    """x `[B, T, E]`, taps `[W, E]`, that of the token itself first: sum_i taps_i x_{t + offset_i}; see `offsets`."""
    return _Convolution.apply(x, taps, causal)


def offsets(width: int, *, causal: bool) -> tuple[int, ...]:
    """How far each tap looks.

    Example:
        >>> offsets(4, causal=True), offsets(4, causal=False)
        ((0, -1, -2, -3), (0, -1, 1, -2))
    """
    return tuple(-i if causal else -(i + 1) // 2 if i % 2 else i // 2 for i in range(width))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(x, taps)
        ctx.causal = causal
        if _is_native(x, taps):
            return _native(x, taps, None, causal, ("out",))["out"]
        return _correlate(x, taps, offsets(len(taps), causal=causal))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        x, taps = ctx.saved_tensors
        wants_x, wants_taps, _ = ctx.needs_input_grad
        if _is_native(x, taps, grad_out):
            wanted = tuple(name for name, wants in (("out", wants_x), ("dtaps", wants_taps)) if wants)
            made = _native(x, taps, grad_out, ctx.causal, wanted)
            return made.get("out"), made["dtaps"].sum(0) if wants_taps else None, None
        there = offsets(len(taps), causal=ctx.causal)
        dx = _correlate(grad_out, taps, [-offset for offset in there]) if wants_x else None
        return dx, _tap_gradients(grad_out, x, there) if wants_taps else None, None


def next_token(
    parts: Sequence[Tensor], recent: Tensor, weight: Tensor, rate: float
) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """One token more of a causal convolution by the C++ engine: to the bit what `convolve` makes of the whole there.

    parts: the token's channels `[B, 1, ..]`, in one tensor or two. recent `[B, W - 1, E]`: inputs before it, the oldest
    first. Taps are rate * weight `[E, 1, W]`. None if there are gradients, or the engine does not take these tensors.
    """
    if torch.is_grad_enabled() or parts[0].dtype is not torch.float32 or not _may_be_native():
        return None
    if recent.layout is not torch.strided:
        return None
    channels = tuple([part.shape[-1] for part in parts])
    try:
        plan = convolution_step_plan(len(parts[0]), channels, weight.shape[-1], rate)
        given, (recent, *out) = plan.problem(weight, recent.contiguous(), parts)
    except SubquadError:
        return None
    call.engine().convolve_step(ctypes.byref(given))
    return tuple(out), recent


# C++ ------------------------------------------------------------------------------------------------------------------


def _is_native(*tensors: Tensor) -> bool:
    """float32 on a CPU, and nothing that only looks like it (traced, transformed, fake)."""
    return _may_be_native() and all(
        x.dtype is torch.float32 and x.is_cpu and x.numel() > 0 and not gate.has_own_operations(x) for x in tensors
    )


def _may_be_native() -> bool:
    """Whatever the tensors are."""
    traced = torch.compiler.is_compiling() or checks.transformed() or checks.forward_mode()
    return library.AVAILABLE and not traced


def _native(x: Tensor, taps: Tensor, grad: Tensor | None, causal: bool, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    plan = convolution_plan(*x.shape, len(taps), causal)
    made = {name: plan.new(name) for name in wanted}
    grad = None if grad is None else grad.contiguous()
    given = plan.problem(torch.get_num_threads(), x=x.contiguous(), taps=taps.contiguous(), grad=grad, **made)
    call.engine().convolve(ctypes.byref(given))
    return made


# torch ----------------------------------------------------------------------------------------------------------------


def _correlate(x: Tensor, taps: Tensor, offsets: Sequence[int]) -> Tensor:
    """sum_i taps_i x_{t + offset_i}, added up in float32 or more."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    for first, last in _tiles(x):
        total = out[:, first:last] if dtype == x.dtype else torch.empty_like(out[:, first:last], dtype=dtype)
        torch.mul(x[:, first:last], taps[0].to(dtype), out=total)
        for tap, offset in zip(taps[1:], offsets[1:], strict=True):
            here, there = _overlap(first, last, offset, x.shape[1])
            total[:, here.start - first : here.stop - first].addcmul_(x[:, there].to(dtype), tap.to(dtype))
        if dtype != x.dtype:
            out[:, first:last] = total
    return out


def _tap_gradients(grad_out: Tensor, x: Tensor, offsets: Sequence[int]) -> Tensor:
    """`[W, E]`: sum_t grad_out_t x_{t + offset_i}; sums of tiles are added up in float32 or more."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    dtaps = x.new_zeros(len(offsets), x.shape[-1], dtype=dtype)
    for first, last in _tiles(x):
        for i, offset in enumerate(offsets):
            here, there = _overlap(first, last, offset, x.shape[1])
            dtaps[i] += (grad_out[:, here] * x[:, there]).sum((0, 1), dtype=dtype)
    return dtaps.to(x.dtype)


def _tiles(x: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of tokens."""
    size = max(1, TILE // max(1, x.shape[0] * x.shape[2]))
    return ((first, min(first + size, x.shape[1])) for first in range(0, x.shape[1], size))


def _overlap(first: int, last: int, offset: int, length: int) -> tuple[slice, slice]:
    """Tokens of a range that have a neighbour at this offset, and those neighbours."""
    first, last = max(first, -offset), min(last, length - offset)
    last = max(first, last)
    return slice(first, last), slice(first + offset, last + offset)
