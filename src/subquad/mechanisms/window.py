"""Sliding windows with dilation, and global tokens (Longformer).

A query sees the keys at most half a window away (causal: the last `window` tokens), in steps of `dilation`, and all
global tokens; a global token sees everything. Positions are counted in real tokens, so padding moves no window.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.checks import window as window_checks
from subquad.kernels.precision import without_autocast
from subquad.kernels.sparse.bands import Band, attend_to_few, band_attention, few_attend
from subquad.kernels.sparse.torch import ABSENT_KEY, ABSENT_QUERY, merge
from subquad.mechanism import Mechanism, State, masked_softmax, real_index, repeat_heads
from subquad.mechanisms.packing import pack, put, slots_of, unpack

QKV = tuple[Tensor, Tensor, Tensor]


class WindowOptions(NamedTuple):
    """dilation: one for all key heads, or one for each."""

    window: int
    dilation: tuple[int, ...]
    global_tokens: int
    scale: float

    def band(self, dilation: int, causal: bool) -> Band:
        half = self.window // 2
        return Band(self.window - 1, 0, dilation) if causal else Band(half, half, dilation)

    @property
    def reach(self) -> int:
        """Tokens before a new one that a causal window can see."""
        return (self.window - 1) * max(self.dilation)


class WindowState(NamedTuple):
    """Constant in size: the last tokens that a window can reach, oldest first, and the leading global ones.

    k `[B, K, reach, D]`, v; global_k `[B, K, global_tokens, D]`, global_v; length `[B]` real tokens so far.
    """

    k: Tensor
    v: Tensor
    global_k: Tensor
    global_v: Tensor
    length: Tensor


@without_autocast
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 256,
    dilation: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    global_mask: Tensor | None = None,
    global_qkv: QKV | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax over the keys in a window around each query, and over global tokens.

    Cost: O(T w D) time, O(T D) memory, forward and backward; global tokens add O(T) each.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, T, D]`; v: `[B, K, T, Dv]`, H a multiple of K.
        window: total width, even: half of it on each side (causal: the last `window` tokens, the own one included).
        dilation: distance of neighbouring keys in the window, or one for each key head.
        key_mask: bool `[B, T]`, True where the token is real. Rows of masked tokens are zero.
        global_mask: bool `[B, T]`, True where a token sees all and is seen by all (if causal, only by later ones).
        global_qkv: other q, k, v for what global tokens see, as Longformer's second set of projections makes them.
        scale: of the logits, `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`.
    Example:
        >>> window_attention(*torch.randn(3, 1, 2, 50, 4), window=8, causal=True).shape
        torch.Size([1, 2, 50, 4])
    """
    checks.qkv("window", q, k, v)
    scale = checks.scale("window", scale, q.shape[-1])
    options = WindowOptions(window_checks.width(window), window_checks.dilation(dilation), 0, scale)
    checks.causal_lengths("window", causal, q, k)
    checks.self_attention("window", q, k)
    checks.key_mask("window", key_mask, k)
    window_checks.dilation_heads(options.dilation, k)
    window_checks.global_mask(global_mask, k)
    window_checks.global_qkv(global_qkv, global_mask, q, k, v)
    return _attend(options, q, k, v, causal, key_mask, global_mask, global_qkv)


def _attend(
    options: WindowOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    global_mask: Tensor | None,
    global_qkv: QKV | None = None,
) -> Tensor:
    """Real tokens side by side, then windows and global tokens, then tokens back in their places."""
    dtype, length = q.dtype, q.shape[2]
    tensors = [x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v, *(global_qkv or ()))]
    if key_mask is None:
        return _attend_packed(options, tensors, None, causal, _all_global(options, global_mask, q)).to(dtype)
    slots = slots_of(real_index(key_mask, k), key_mask, length)
    tensors = [pack(x, slots, length) for x in tensors]
    alive = torch.arange(length, device=q.device) < key_mask.sum(-1, keepdim=True)
    if global_mask is not None:
        global_mask = pack(global_mask[:, None, :, None], slots, length)[:, 0, :, 0]
    out = _attend_packed(options, tensors, alive, causal, _all_global(options, global_mask, q, alive))
    return unpack(out, slots).to(dtype)


def _all_global(options: WindowOptions, mask: Tensor | None, q: Tensor, alive: Tensor | None = None) -> Tensor | None:
    """bool `[B, T]` of packed tokens that are global, by the mask or as leading ones; None if there is none."""
    if options.global_tokens:
        leading = (torch.arange(q.shape[2], device=q.device) < options.global_tokens).expand(q.shape[0], -1)
        mask = leading if mask is None else mask | leading
    return mask if mask is None or alive is None else mask & alive


def _attend_packed(
    options: WindowOptions, tensors: list[Tensor], alive: Tensor | None, causal: bool, global_mask: Tensor | None
) -> Tensor:
    """alive `[B, T]`: real tokens come first. tensors: q, k, v, and those of global tokens if they have their own."""
    q, k, v, *own = tensors
    if global_mask is None or not bool(global_mask.any()):
        return _windows(options, q, k, v, causal, alive)[0]
    positions = torch.arange(q.shape[2], device=q.device)[None]
    slots, places = _global_slots(global_mask)
    there = ~global_mask if alive is None else alive & ~global_mask
    parts = [_windows(options, q, k, v, causal, there)]
    few_k, few_v = (_gather(x, slots) for x in (k, v))
    few_place = places.masked_fill(places < 0, ABSENT_KEY)
    parts.append(attend_to_few(q, few_k, few_v, positions, few_place, causal, options.scale))
    out = merge(*(list(x) for x in zip(*parts, strict=True)))
    global_q, global_k, global_v = own or (q, k, v)
    k_place = positions if alive is None else positions.masked_fill(~alive, ABSENT_KEY)
    rows = few_attend(
        _gather(global_q, slots),
        global_k,
        global_v,
        places.masked_fill(places < 0, ABSENT_QUERY),
        k_place.expand(q.shape[0], -1),
        causal,
        options.scale,
    )
    return put(out, rows, torch.where(places < 0, q.shape[2], slots))


def _windows(
    options: WindowOptions, q: Tensor, k: Tensor, v: Tensor, causal: bool, alive: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The part of the windows; heads of one dilation at a time."""

    def attend(q: Tensor, k: Tensor, v: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
        return band_attention(q, k, v, options.band(dilation, causal), alive, options.scale)

    return by_dilation(options.dilation, q, k, v, attend)


def by_dilation(
    dilations: tuple[int, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """`attend` on the heads of each dilation, put together again in the order of the heads."""
    if len(set(dilations)) == 1:
        return attend(q, k, v, dilations[0])
    of_head = torch.tensor(dilations, device=q.device)
    of_query = of_head.repeat_interleave(q.shape[1] // k.shape[1])
    parts, order = [], []
    for dilation in sorted(set(dilations)):
        heads, queries = (of == dilation for of in (of_head, of_query))
        parts.append(attend(q[:, queries], k[:, heads], v[:, heads], dilation))
        order.append(queries.nonzero()[:, 0])
    back = torch.cat(order).argsort()
    out, log_normaliser = (torch.cat(x, 1)[:, back] for x in zip(*parts, strict=True))
    return out, log_normaliser


def _global_slots(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, most]` positions of the global tokens, and the same with -1 where a sequence has fewer than the most."""
    most = int(mask.sum(-1).max())
    first, slots = mask.to(torch.int8).topk(most, dim=-1, sorted=True)
    return slots, torch.where(first > 0, slots, -1)


def _gather(x: Tensor, slots: Tensor) -> Tensor:
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


class WindowAttention(Mechanism):
    """Longformer's attention behind the contract; with `extend` it is also Transformer-XL's segment memory.

    Args:
        head_dim: D of the queries and keys.
        window: total width, even: half of it on each side of a token (causal: the last `window` tokens).
        dilation: distance of neighbouring keys in the window, or one for each key head.
        global_tokens: that many leading tokens see all and are seen by all; `forward` also takes any `global_mask`.
        scale: `1 / sqrt(head_dim)` unless given.

    Example:
        >>> attention = WindowAttention(head_dim=4, window=8, global_tokens=1)
        >>> attention(*torch.randn(3, 1, 2, 50, 4)).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "window"

    def __init__(
        self,
        head_dim: int,
        window: int = 256,
        *,
        dilation: int | Sequence[int] = 1,
        global_tokens: int = 0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.options = WindowOptions(
            window=window_checks.width(window),
            dilation=window_checks.dilation(dilation),
            global_tokens=checks.count(self.name, "global_tokens", global_tokens, minimum=0),
            scale=checks.scale(self.name, scale, head_dim),
        )

    @property
    def positional(self) -> bool:
        return True

    def extra_repr(self) -> str:
        o = self.options
        dilation = o.dilation[0] if len(o.dilation) == 1 else list(o.dilation)
        return (
            f"head_dim={self.head_dim}, window={o.window}, dilation={dilation}, global_tokens={o.global_tokens}, "
            f"scale={o.scale:.4g}"
        )

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        window_checks.dilation_heads(self.options.dilation, k)

    @without_autocast
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
        global_qkv: QKV | None = None,
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        window_checks.global_mask(global_mask, k)
        window_checks.global_qkv(global_qkv, global_mask, q, k, v)
        return _attend(self.options, q, k, v, causal, key_mask, global_mask, global_qkv)

    # The definition ---------------------------------------------------------------------------------------------------

    @without_autocast
    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rows: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights, `[B, H, T, T]` or `[B, H, len(rows), T]`."""
        self.check_matrix(q, k, causal, key_mask, rows)
        window_checks.global_mask(global_mask, k)
        rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
        index = real_index(key_mask, k)
        seen = self._seen(index[:, rows], index, rows, causal, global_mask, q.shape[1])
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
            seen = seen & key_mask[:, None, None] & key_mask[:, None, rows, None]
        return self.dense_weights(q[:, :, rows], repeat_heads(k, q.shape[1]), seen, index[:, rows], index)

    def _seen(
        self, q_index: Tensor, k_index: Tensor, rows: Tensor, causal: bool, global_mask: Tensor | None, heads: int
    ) -> Tensor:
        """`[B or 1, H or 1, R, T]`: |i - j| <= w d / 2 in steps of d, or one of both is global."""
        apart = (q_index[:, :, None] - k_index[:, None])[:, None]
        dilation = torch.tensor(self.options.dilation, device=apart.device)
        dilation = dilation.repeat_interleave(heads // len(dilation) if len(dilation) > 1 else 1)[:, None, None]
        band = self.options.band(1, causal)
        seen = (apart % dilation == 0) & (apart <= band.back * dilation) & (apart >= -band.ahead * dilation)
        q_global, k_global = (index < self.options.global_tokens for index in (q_index, k_index))
        if global_mask is not None:
            q_global, k_global = q_global | global_mask[:, rows], k_global | global_mask
        seen = seen | q_global[:, None, :, None] | k_global[:, None, None]
        return seen & (apart >= 0) if causal else seen

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return masked_softmax(self.options.scale * q @ k.mT, seen)

    @without_autocast
    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        weights = self.attention_matrix(q, k, causal=causal, key_mask=key_mask, global_mask=global_mask)
        if key_mask is not None:
            v = v.masked_fill(~key_mask[:, None, :, None], 0)
        return weights @ repeat_heads(v, q.shape[1])

    # Decoding ---------------------------------------------------------------------------------------------------------

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        self.check_extend(q, k, v, key_mask)
        past = self._past(k, v, state)
        length, new = past.length[:, None], k.shape[2]
        count = torch.full_like(length, new) if key_mask is None else key_mask.sum(-1, keepdim=True)
        slots = None if key_mask is None else slots_of(real_index(key_mask, k), key_mask, new)
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_, k_, v_ = (x if slots is None else pack(x, slots, new) for x in (q, k, v))
        line_k, line_v = torch.cat([past.k, k_], 2), torch.cat([past.v, v_], 2)
        position = length - past.k.shape[2] + torch.arange(line_k.shape[2], device=k.device)
        real = (position >= 0) & (position < length + count)
        after = self._after(past, line_k, line_v, position, real, count[:, 0])
        alive = real & (position >= self.options.global_tokens)
        x, line_k, line_v = (t.to(dtype) for t in (q_, line_k, line_v))
        parts = [_windows(self.options, x, line_k, line_v, True, alive)]
        if self.options.global_tokens:
            parts.append(self._to_globals(x, after, position[:, -new:], dtype))
        out = merge(*(list(p) for p in zip(*parts, strict=True))).to(q.dtype)
        return (out if slots is None else unpack(out, slots)), after

    def _past(self, k: Tensor, v: Tensor, state: State | None) -> WindowState:
        (batch, heads), reach, leading = k.shape[:2], self.options.reach, self.options.global_tokens
        fields = {
            "k": states.kept(batch, heads, reach, k.shape[3]),
            "v": states.kept(batch, heads, reach, v.shape[3]),
            "global_k": states.kept(batch, heads, leading, k.shape[3]),
            "global_v": states.kept(batch, heads, leading, v.shape[3]),
            "length": states.counted(batch),
        }
        return states.state(self.name, state, WindowState, fields, k)

    def _after(
        self, past: WindowState, line_k: Tensor, line_v: Tensor, position: Tensor, real: Tensor, count: Tensor
    ) -> WindowState:
        """The last tokens that a window can reach; leading ones also where they are kept for good."""
        reach, leading = past.k.shape[2], self.options.global_tokens
        last = (count[:, None] + torch.arange(reach, device=count.device))[:, None, :, None]
        kept_k, kept_v = (x.gather(2, last.expand(-1, x.shape[1], -1, x.shape[3])) for x in (line_k, line_v))
        new = real & (position >= past.length[:, None]) & (position < leading)
        slots = slots_of(position, new, leading)
        global_k, global_v = (put(old, x, slots) for old, x in ((past.global_k, line_k), (past.global_v, line_v)))
        return WindowState(kept_k, kept_v, global_k, global_v, past.length + count)

    def _to_globals(self, q: Tensor, state: WindowState, q_place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        places = torch.arange(self.options.global_tokens, device=q.device)
        places = places.masked_fill(places >= state.length[:, None], ABSENT_KEY)
        few_k, few_v = (t.to(dtype) for t in (state.global_k, state.global_v))
        q_place = q_place.clamp(max=self.options.global_tokens)  # all are before it; labels are int32, lengths are not
        return attend_to_few(q, few_k, few_v, q_place, places, True, self.options.scale)
