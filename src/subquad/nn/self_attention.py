"""Self-attention: projections, short convolutions, norms and rotation around a mechanism."""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import checks as common
from subquad.checks import layers as checks
from subquad.features.draws import derived_seed
from subquad.mechanism import Mechanism, RandomFeatures, State
from subquad.mechanisms import attention as make_mechanism
from subquad.mechanisms import mechanism_class
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention
from subquad.nn.positions import Rotation
from subquad.nn.short_convolution import ShortConvolution


class Context(NamedTuple):
    """What all layers of one call share. key_mask `[B, T]`, True = real."""

    causal: bool
    key_mask: Tensor | None = None
    rotation: Rotation | None = None


class LayerState(NamedTuple):
    """The state of a layer with a short convolution: that of its mechanism, and the last inputs of the convolution.

    recent: of `short_conv - 1` real tokens, `[B, short_conv - 1, channels of q and k]`.
    """

    attention: State
    recent: Tensor


def layer_mechanism(
    name: str,
    options: dict[str, Any],
    *,
    head_dim: int,
    key_heads: int,
    layer: int = 0,
    max_length: int | None = None,
) -> Mechanism:
    """The mechanism `name` for one layer: what it draws differs between layers, between heads and between parts."""
    checks.no_head_dim(name, options)
    options = mechanism_class(name).layer_options(options, key_heads=key_heads, max_length=max_length)
    mechanism = make_mechanism(name, head_dim=head_dim, **options)
    own = _own_draws(mechanism, options, key_heads, (layer,))
    return mechanism if own is options else make_mechanism(name, head_dim=head_dim, **own)


def _own_draws(mechanism: Mechanism, options: dict[str, Any], key_heads: int, place: tuple[int, ...]) -> dict[str, Any]:
    """`options`, with a draw for each key head that depends on the place, if the mechanism draws at random.

    place: the layer, and in a mixed one the part.
    """
    if isinstance(mechanism, MixedAttention):
        parts = [
            _own_draws(part, given, len(given["heads"]), (*place, number))
            for number, (part, given) in enumerate(zip(mechanism.mechanisms(), options["parts"], strict=True))
        ]
        return options | {"parts": parts}
    drawn = isinstance(mechanism, RandomFeatures) and next(mechanism.buffers(), None) is not None
    if not drawn and not isinstance(mechanism, FavorAttention):  # whose learned features begin at random too
        return options
    return {"num_heads": key_heads, **options, "seed": derived_seed(options.get("seed") or 0, *place)}


def layer_seed(seed: int, layer: int) -> int:
    """The seed of a layer's random features; layers do not share one."""
    return derived_seed(seed, layer)


class SelfAttention(nn.Module):
    """x `[B, T, hidden_size]` -> the same shape, through heads of any mechanism.

    Args:
        attention: name of the mechanism; `options` are its own.
        num_key_value_heads: fewer key heads than query heads (GQA); None for as many.
        shared_qk: keys are the queries, each divided by its root mean square (Reformer): one projection less.
        layer: index of the layer, so that layers draw different random features.
        max_length: the longest sequence, for mechanisms bound to it whose options do not say.
        short_conv: taps of the convolution over neighbouring tokens that queries and keys go through before the
            rotation, so that they know what stands before them; 0 for none. See `ShortConvolution`.
        qk_norm: queries and keys of each head are divided by their root mean square and multiplied by a size that is
            learned, one for each head.

    Example:
        >>> import torch
        >>> layer = SelfAttention(32, 4, attention="linear")
        >>> layer(torch.randn(2, 10, 32), Context(causal=True)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        attention: str = "favor",
        options: dict[str, Any] | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        shared_qk: bool = False,
        bias: bool = False,
        layer: int = 0,
        max_length: int | None = None,
        short_conv: int = 0,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        key_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        checks.heads(hidden_size, num_heads, key_heads, head_dim)
        checks.shared_heads(shared_qk, num_heads, key_heads)
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = None if shared_qk else nn.Linear(hidden_size, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.mechanism = layer_mechanism(
            attention,
            options or {},
            head_dim=self.head_dim,
            key_heads=key_heads,
            layer=layer,
            max_length=max_length,
        )
        common.count("attention layer", "short_conv", short_conv, minimum=0)
        self.channels = [part.out_features for part in (self.q_proj, self.k_proj) if part is not None]
        self.short_conv = ShortConvolution(sum(self.channels), short_conv) if short_conv else None
        checks.qk_norm(qk_norm, shared_qk)
        self.q_size = nn.Parameter(torch.empty(num_heads, 1, 1)) if qk_norm else None
        self.k_size = nn.Parameter(torch.empty(key_heads, 1, 1)) if qk_norm else None
        self.reset_sizes()

    def reset_sizes(self) -> None:
        """The root mean square of normalised queries and keys is one to begin with."""
        for size in (self.q_size, self.k_size):
            if size is not None:
                nn.init.ones_(size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        qk = self._queries_and_keys(x)
        if self.short_conv is not None:
            qk = self.short_conv.of_parts(qk, causal=context.causal, key_mask=context.key_mask)
        q, k, v = self._heads(qk, self.v_proj(x), context)
        return self._merge(self.mechanism(q, k, v, causal=context.causal, key_mask=context.key_mask))

    def extend(
        self, x: Tensor, context: Context, state: State | LayerState | None
    ) -> tuple[Tensor, State | LayerState]:
        """The next tokens of a sequence whose past is in `state`."""
        qk, v = self._queries_and_keys(x), self.v_proj(x)
        short_conv = self.short_conv
        if short_conv is None:
            past = cast(State | None, state)
            out, state = self.mechanism.extend(*self._heads(qk, v, context), past, key_mask=context.key_mask)
            return self._merge(out), state
        past, recent = checks.layer_state(state, LayerState) or (None, None)
        qk, recent = short_conv.extend_parts(qk, recent, key_mask=context.key_mask)
        q, k, v = self._heads(qk, v, context)
        out, past = self.mechanism.extend(q, k, v, past, key_mask=context.key_mask)
        return self._merge(out), LayerState(past, recent)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[B, T, heads * D]` each; queries alone, if keys are made of them."""
        return (self.q_proj(x),) if self.k_proj is None else (self.q_proj(x), self.k_proj(x))

    def _heads(self, qk: tuple[Tensor, ...], v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, *keys = (self._split(part) for part in qk)
        k = keys[0] if keys else F.rms_norm(q, (self.head_dim,))
        if self.q_size is not None and self.k_size is not None:
            q, k = (
                F.rms_norm(x, (self.head_dim,)) * size.to(x.dtype) for x, size in ((q, self.q_size), (k, self.k_size))
            )
        if context.rotation is not None:
            q, k = context.rotation(q), context.rotation(k)
        return q, k, self._split(v)

    def _split(self, x: Tensor) -> Tensor:
        """`[B, T, heads * D] -> [B, heads, T, D]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _merge(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2))
