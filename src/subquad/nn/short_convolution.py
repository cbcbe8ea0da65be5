"""A convolution over a few neighbouring tokens, one filter per channel, so that a token knows what stands beside it.

Attention compares tokens by what they are; "what followed this word the last time?" needs keys that know their
predecessor. Layers can learn that from positions, but slowly.

Letters: B batch, T tokens, E channels, W taps.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from subquad import checks
from subquad.checks.layers import recent_tokens
from subquad.mechanism import real_index
from subquad.mechanisms.packing import pack, slots_of, unpack

RATE = 8.0  # taps per unit of `weight`, see ShortConvolution; a power of two, so that the identity is exact
TILE = 1 << 16  # numbers done at once: every tap finds its tile in the cache


class ShortConvolution(nn.Module):
    """x `[B, T, channels]` -> the same shape: each channel a sum of its neighbours, by `width` taps of its own.

    Causal: the token and those before it, offsets 0, -1, -2, ... Bidirectional: both sides in turn, offsets 0, -1, 1,
    -2, ... Neighbours are real tokens, whatever padding lies between them; missing ones count zero; rows of masked
    tokens are zero. It begins as the identity.

    `weight` `[channels, 1, width]` holds taps / 8, that of the token itself first. Optimisers of Adam's kind move a
    number by the learning rate per step whatever its gradient, and a shift by one token changes taps by one: at a rate
    that suits the matrices around it, that would take hundreds of steps.

    Example:
        >>> ShortConvolution(8, width=4)(torch.randn(2, 10, 8), causal=True).shape
        torch.Size([2, 10, 8])
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = checks.count("short convolution", "width", width)
        self.weight = nn.Parameter(torch.empty(checks.count("short convolution", "channels", channels), 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.weight.zero_()[..., 0] = 1 / RATE

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, width={self.width}"

    def forward(self, x: Tensor, *, causal: bool, key_mask: Tensor | None = None) -> Tensor:
        """key_mask bool `[B, T]`, True where a token is real."""
        if key_mask is None:
            return self._convolve(x, causal)
        x, slots = _real_tokens_first(x, key_mask)
        return unpack(self._convolve(x, causal)[:, None], slots)[:, 0]

    def extend(self, x: Tensor, recent: Tensor | None, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Causal, for the next tokens of a sequence: the output, and what it must know of its past then.

        recent: the last `width - 1` real inputs `[B, width - 1, channels]`, zeros before the first; None at the start.
        """
        batch, length, channels = x.shape
        if recent is None:
            recent = x.new_zeros(batch, self.width - 1, channels)
        recent_tokens(recent, x, self.width)
        if key_mask is None:
            past = torch.cat([recent, x], 1)
            return self._convolve(past, True)[:, self.width - 1 :], past[:, length:]
        x, slots = _real_tokens_first(x, key_mask)
        past = torch.cat([recent, x], 1)
        out = unpack(self._convolve(past, True)[:, None, self.width - 1 :], slots)[:, 0]
        last = key_mask.sum(-1)[:, None] + torch.arange(self.width - 1, device=x.device)
        return out, past.gather(1, last[..., None].expand(-1, -1, channels))

    def _convolve(self, x: Tensor, causal: bool) -> Tensor:
        return _Convolution.apply(x, RATE * self.weight[:, 0].to(x.dtype), offsets(self.width, causal=causal))


def offsets(width: int, *, causal: bool) -> tuple[int, ...]:
    """Of each tap.

    Example:
        >>> offsets(4, causal=True), offsets(4, causal=False)
        ((0, -1, -2, -3), (0, -1, 1, -2))
    """
    return tuple(-i if causal else -(i + 1) // 2 if i % 2 else i // 2 for i in range(width))


def _real_tokens_first(x: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """x `[B, T, E]` with the real tokens side by side, zeros after them; and the slots of the tokens."""
    slots = slots_of(real_index(key_mask, x[:, None]), key_mask, x.shape[1])
    return pack(x[:, None], slots, x.shape[1])[:, 0], slots


class _Convolution(torch.autograd.Function):
    """Written out, because torch's depthwise convolution is up to five times slower on CPUs in this layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, offsets: Sequence[int]) -> Tensor:
        """x `[B, T, E]`, taps `[E, W]`."""
        ctx.save_for_backward(x, taps)
        ctx.offsets = offsets
        return _correlate(x, taps, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        x, taps = ctx.saved_tensors
        dx = _correlate(grad_out, taps, [-offset for offset in ctx.offsets]) if ctx.needs_input_grad[0] else None
        return dx, _tap_gradients(grad_out, x, ctx.offsets) if ctx.needs_input_grad[1] else None, None


def _correlate(x: Tensor, taps: Tensor, offsets: Sequence[int]) -> Tensor:
    """sum_i taps_i x_{t + offset_i}."""
    columns = [column.contiguous() for column in taps.unbind(-1)]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first, last in _tiles(x):
        torch.mul(x[:, first:last], columns[0], out=out[:, first:last])
        for column, offset in zip(columns[1:], offsets[1:], strict=True):
            here, there = _overlap(first, last, offset, x.shape[1])
            out[:, here].addcmul_(x[:, there], column)
    return out


def _tap_gradients(grad_out: Tensor, x: Tensor, offsets: Sequence[int]) -> Tensor:
    """`[E, W]`: sum_t grad_out_t x_{t + offset_i}; sums of tiles are added up in float32 or more."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    dtaps = x.new_zeros(len(offsets), x.shape[-1], dtype=dtype)
    for first, last in _tiles(x):
        for i, offset in enumerate(offsets):
            here, there = _overlap(first, last, offset, x.shape[1])
            dtaps[i] += (grad_out[:, here] * x[:, there]).sum((0, 1), dtype=dtype)
    return dtaps.mT.to(x.dtype)


def _tiles(x: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of tokens."""
    size = max(1, TILE // (x.shape[0] * x.shape[2]))
    return ((first, min(first + size, x.shape[1])) for first in range(0, x.shape[1], size))


def _overlap(first: int, last: int, offset: int, length: int) -> tuple[slice, slice]:
    """Tokens of a range that have a neighbour at this offset, and those neighbours."""
    first, last = max(first, -offset), min(last, length - offset)
    last = max(first, last)
    return slice(first, last), slice(first + offset, last + offset)
