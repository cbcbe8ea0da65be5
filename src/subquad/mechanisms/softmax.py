"""Exact softmax attention, by torch's own kernels: the yardstick."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.mechanism import Mechanism, State, masked_softmax


class SoftmaxState(NamedTuple):
    """All past keys and values `[B, K, S, ...]` and which of them are real `[B, S]`: grows with the length."""

    k: Tensor
    v: Tensor
    mask: Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v.

    Cost: O(T S D) time, O(T D) memory without a mask.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, S, D]`; v: `[B, K, S, Dv]`, H a multiple of K.
        key_mask: bool `[B, S]`, True where the key is real.
        scale: `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`.
    Example:
        >>> softmax_attention(*torch.randn(3, 1, 2, 5, 4)).shape
        torch.Size([1, 2, 5, 4])
    """
    checks.qkv("softmax", q, k, v)
    checks.key_mask("softmax", key_mask, k)
    checks.causal_lengths("softmax", causal, q, k)
    scale = checks.scale("softmax", scale, q.shape[-1])
    if key_mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=_grouped(q, k))
    seen = key_mask[:, None, None].expand(-1, -1, q.shape[2], -1)
    return _masked(q, k, v, seen.tril() if causal else seen, key_mask, scale)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, key_mask: Tensor, scale: float) -> Tensor:
    """seen `[B, 1, T, S]`. What masked keys hold must not matter, and rows that see nothing become zeros."""
    k, v = (t.masked_fill(~key_mask[:, None, :, None], 0) for t in (k, v))
    sees = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~sees, scale=scale, enable_gqa=_grouped(q, k))
    return out.masked_fill(~sees, 0)


class SoftmaxAttention(Mechanism):
    """Exact attention behind the contract; `extend` keeps all keys and values.

    Example:
        >>> SoftmaxAttention(head_dim=4)(*torch.randn(3, 1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "softmax"
    state_grows = True
    float32_floor = 1e-5  # torch's CPU kernel takes exponentials to about 20 units in the last place

    def __init__(self, head_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.scale = checks.scale(self.name, scale, head_dim)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, scale={self.scale:.4g}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        return softmax_attention(q, k, v, causal=causal, key_mask=key_mask, scale=self.scale)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return masked_softmax(self.scale * q @ k.mT, seen)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, SoftmaxState]:
        self.check_extend(q, k, v, key_mask)
        mask = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        state = SoftmaxState(*self._with_past(k, v, mask, state))
        new, total = q.shape[2], state.k.shape[2]
        if (
            new == 1 and not torch.compiler.is_compiling() and bool(state.mask.all())
        ):  # sees everything: no mask to build
            return softmax_attention(q, state.k, state.v, scale=self.scale), state
        seen = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new) & state.mask[:, None, None]
        return _masked(q, state.k, state.v, seen, state.mask, self.scale), state

    def join_states(self, states: Sequence[State]) -> SoftmaxState:
        """Padding stands before shorter sequences: all grow at one end, and are cut at the other."""
        given = [_cut(cast(SoftmaxState, state)) for state in states]
        longest = max(state.mask.shape[1] for state in given)
        parts = zip(*(_padded(state, longest) for state in given), strict=True)
        return SoftmaxState(*(torch.cat(part) for part in parts))

    def _with_past(self, k: Tensor, v: Tensor, mask: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
        if state is None:
            return k, v, mask
        batch, heads = k.shape[:2]
        fields = {
            "k": states.kept(batch, heads, "S", k.shape[3]),
            "v": states.kept(batch, heads, "S", v.shape[3]),
            "mask": states.flagged(batch, "S"),
        }
        past_k, past_v, past_mask = states.state(self.name, state, SoftmaxState, fields, k)
        return torch.cat([past_k, k], 2), torch.cat([past_v, v], 2), torch.cat([past_mask, mask], 1)


def _cut(state: SoftmaxState) -> SoftmaxState:
    """Without the leading places where no sequence has a token."""
    first = int((state.mask.any(0).cumsum(0) == 0).sum())
    return SoftmaxState(state.k[:, :, first:], state.v[:, :, first:], state.mask[:, first:])


def _padded(state: SoftmaxState, length: int) -> SoftmaxState:
    before = length - state.mask.shape[1]
    k, v = (F.pad(x, (0, 0, before, 0)) for x in (state.k, state.v))
    return SoftmaxState(k, v, F.pad(state.mask, (before, 0)))
