"""A convolution over a few neighbouring tokens, one filter per channel, so that a token knows what stands beside it.

Attention compares tokens by what they are; "what followed this word the last time?" needs keys that know their
predecessor. Layers can learn that from positions, but slowly.

Letters: B batch, T tokens, E channels, W taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.checks.layers import convolved, recent_tokens
from subquad.kernels.convolution import convolve, next_token
from subquad.mechanism import real_index
from subquad.mechanisms.packing import pack, slots_of, unpack

RATE = 8.0  # taps per unit of `weight`, see ShortConvolution; a power of two, so that the identity is exact


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
        convolved(x, key_mask, self.weight)
        return self.of_parts((x,), causal=causal, key_mask=key_mask)[0]

    def of_parts(self, parts: Sequence[Tensor], *, causal: bool, key_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """The same of the channels in parts `[B, T, some channels]`, without a copy that has them side by side."""
        taps = self._taps(parts[0]).split([part.shape[-1] for part in parts], -1)
        if key_mask is None:
            return tuple(convolve(x, own, causal=causal) for x, own in zip(parts, taps, strict=True))
        checks.key_mask("short convolution", key_mask, parts[0][:, None])
        slots = slots_of(real_index(key_mask, parts[0][:, None]), key_mask, key_mask.shape[1])
        packed = (pack(x[:, None], slots, x.shape[1])[:, 0] for x in parts)
        mixed = (convolve(x, own, causal=causal) for x, own in zip(packed, taps, strict=True))
        return tuple(unpack(x[:, None], slots)[:, 0] for x in mixed)

    def extend(self, x: Tensor, recent: Tensor | None, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Causal, for the next tokens of a sequence: the output, and what it must know of its past then.

        recent: the last `width - 1` real inputs `[B, width - 1, channels]`, zeros before the first; None at the start.
        """
        convolved(x, key_mask, self.weight)
        (out,), recent = self.extend_parts((x,), recent, key_mask=key_mask)
        return out, recent

    def extend_parts(
        self, parts: Sequence[Tensor], recent: Tensor | None, *, key_mask: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The same of the channels in parts, which share one past. One token goes straight to the engine, if it may."""
        if key_mask is None and type(recent) is Tensor and parts[0].shape[1] == 1:
            done = next_token(parts, recent, self.weight, RATE)
            if done is not None:
                return done
        x = parts[0] if len(parts) == 1 else torch.cat([*parts], -1)
        convolved(x, key_mask, self.weight)
        out, recent = self._extend(x, recent, key_mask)
        return out.split([part.shape[-1] for part in parts], -1), recent

    def _extend(self, x: Tensor, recent: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, length, channels = x.shape
        if recent is None:
            recent = x.new_zeros(batch, self.width - 1, channels)
        recent_tokens(recent, x, self.width)
        if key_mask is None:
            past = torch.cat([recent, x], 1)
            if length == 1:  # the taps of one token, in as few operations as may be
                full = past.to(torch.promote_types(past.dtype, torch.float32))
                return (full * self._taps(x).flip(0)).sum(1, keepdim=True).to(x.dtype), past[:, 1:]
            return self._convolve(past, True)[:, self.width - 1 :], past[:, length:]
        x, slots = _real_tokens_first(x, key_mask)
        past = torch.cat([recent, x], 1)
        out = unpack(self._convolve(past, True)[:, None, self.width - 1 :], slots)[:, 0]
        last = key_mask.sum(-1)[:, None] + torch.arange(self.width - 1, device=x.device)
        return out, past.gather(1, last[..., None].expand(-1, -1, channels))

    def _taps(self, x: Tensor) -> Tensor:
        """`[width, channels]`, that of the token itself first."""
        return RATE * self.weight[:, 0].mT.to(x.dtype)

    def _convolve(self, x: Tensor, causal: bool) -> Tensor:
        return convolve(x, self._taps(x), causal=causal)


def _real_tokens_first(x: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """x `[B, T, E]` with the real tokens side by side, zeros after them; and the slots of the tokens."""
    slots = slots_of(real_index(key_mask, x[:, None]), key_mask, x.shape[1])
    return pack(x[:, None], slots, x.shape[1])[:, 0], slots
