"""The factorised patterns of the Sparse Transformer: a query sees near tokens, and columns that reach all others."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.checks import strided as strided_checks
from subquad.kernels.precision import without_autocast
from subquad.mechanism import Mechanism, State, masked_softmax, real_index
from subquad.mechanisms import strided_state
from subquad.mechanisms.packing import pack, slots_of, unpack
from subquad.mechanisms.strided_parts import StridedOptions, attend, in_blocks
from subquad.mechanisms.strided_state import FixedState, StridedState

PATTERNS = ("strided", "fixed")
DEFAULT_SUMMARY = 8


@without_autocast
def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    stride: int = 128,
    pattern: str = "strided",
    summary: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax over some of the keys: i sees j if |i - j| < stride or stride divides i - j; or, pattern "fixed", if
    both are in one block of `stride` tokens or j is among the last `summary` of any block. Causal: j <= i too.

    Cost: O(T (stride + T / stride) D) time, O(T D) memory: O(T sqrt(T)) for a stride of about sqrt(T).

    Args:
        q: `[B, H, T, D]`; k: `[B, K, T, D]`; v: `[B, K, T, Dv]`, H a multiple of K.
        key_mask: bool `[B, T]`, True where the token is real. Positions count real tokens only.
        summary: only with pattern="fixed": 8 unless given, or the stride if that is less.
        scale: `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`. Rows of masked tokens are zero.
    Example:
        >>> strided_attention(*torch.randn(3, 1, 2, 50, 4), stride=7, causal=True).shape
        torch.Size([1, 2, 50, 4])
    """
    checks.qkv("strided", q, k, v)
    options = make_options(stride, pattern, summary, scale, head_dim=q.shape[-1])
    checks.causal_lengths("strided", causal, q, k)
    checks.self_attention("strided", q, k)
    checks.key_mask("strided", key_mask, k)
    return _run(options, q, k, v, causal, key_mask)


def make_options(
    stride: int, pattern: str, summary: int | None, scale: float | None, *, head_dim: int
) -> StridedOptions:
    checks.choice("strided", "pattern", pattern, PATTERNS)
    stride = checks.count("strided", "stride", stride)
    strided_checks.summary(pattern, stride, summary)
    if pattern == "strided":
        summary = 0
    elif summary is None:
        summary = min(DEFAULT_SUMMARY, stride)
    return StridedOptions(stride, summary, checks.scale("strided", scale, head_dim))


def _run(options: StridedOptions, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    length, dtype = q.shape[2], q.dtype
    options = options.within(length)
    if key_mask is None:
        return attend(options, in_blocks(q, k, v, None, options.stride), causal)[:, :, :length].to(dtype)
    slots = slots_of(real_index(key_mask, k), key_mask, length)
    q, k, v = (pack(x, slots, length) for x in (q, k, v))
    out = attend(options, in_blocks(q, k, v, key_mask.sum(-1), options.stride), causal)
    return unpack(out[:, :, :length], slots).to(dtype)


class StridedAttention(Mechanism):
    """Attention of a Sparse Transformer, both patterns, in one softmax over what a query sees.

    Args:
        head_dim: D of the queries and keys.
        stride: tokens of a window or block; about the square root of the length is cheapest.
        pattern: "strided" (window and every stride-th token: data with a period, such as rows of an image) or "fixed"
            (own block and the last `summary` tokens of every block: text).
        summary: only with pattern="fixed"; 8 unless given, or the stride if that is less.

    Example:
        >>> attention = StridedAttention(head_dim=4, stride=7, pattern="fixed", summary=2)
        >>> attention(*torch.randn(3, 1, 2, 50, 4), causal=True).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "strided"
    state_grows = True  # every past token may be in a later one's column; "fixed" keeps a summary of each block only

    def __init__(
        self,
        head_dim: int,
        stride: int = 128,
        *,
        pattern: str = "strided",
        summary: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.pattern = pattern
        self.options = make_options(stride, pattern, summary, scale, head_dim=head_dim)

    def extra_repr(self) -> str:
        stride, summary, scale = self.options
        places = f", summary={summary}" if summary else ""
        return f"head_dim={self.head_dim}, stride={stride}, pattern={self.pattern!r}{places}, scale={scale:.4g}"

    @property
    def positional(self) -> bool:
        return True

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        return _run(self.options, q, k, v, causal, key_mask)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        stride, summary, scale = self.options
        i, j = q_index[:, None, :, None], k_index[:, None, None]
        if self.pattern == "strided":
            pattern = ((i - j).abs() < stride) | ((i - j) % stride == 0)
        else:
            pattern = (i // stride == j // stride) | (j % stride >= stride - summary)
        return masked_softmax(scale * q @ k.mT, seen & pattern)

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, StridedState | FixedState]:
        self.check_extend(q, k, v, key_mask)
        kind = FixedState if self.options.summary else StridedState
        fields = strided_state.fields(self.options, k, v)
        past = states.state(self.name, state, kind, fields, k)
        states.lengths_kept(self.name, past.length, *strided_state.room(self.options, past))
        real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        return strided_state.extend(self.options, q, k, v, past, real)

    def join_states(self, states: Sequence[State]) -> StridedState | FixedState:
        return strided_state.join(self.options, cast("Sequence[StridedState | FixedState]", states))
