"""Self-attention: projections and rotation around a mechanism."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import layers as checks
from subquad.features.draws import derived_seed
from subquad.mechanism import Mechanism, RandomFeatures, State
from subquad.mechanisms import attention as make_mechanism
from subquad.mechanisms import mechanism_class
from subquad.mechanisms.favor import FavorAttention
from subquad.nn.positions import Rotation


class Context(NamedTuple):
    """What all layers of one call share. key_mask `[B, T]`, True = real."""

    causal: bool
    key_mask: Tensor | None = None
    rotation: Rotation | None = None


def layer_mechanism(
    name: str,
    options: dict[str, Any],
    *,
    head_dim: int,
    key_heads: int,
    layer: int = 0,
    max_length: int | None = None,
) -> Mechanism:
    """The mechanism `name` for one layer: what it draws differs between layers and between heads."""
    checks.no_head_dim(name, options)
    options = mechanism_class(name).layer_options(options, key_heads=key_heads, max_length=max_length)
    mechanism = make_mechanism(name, head_dim=head_dim, **options)
    drawn = isinstance(mechanism, RandomFeatures) and next(mechanism.buffers(), None) is not None
    if not drawn and not isinstance(mechanism, FavorAttention):  # whose learned features begin at random too
        return mechanism
    own = {"num_heads": key_heads, **options, "seed": layer_seed(options.get("seed") or 0, layer)}
    return make_mechanism(name, head_dim=head_dim, **own)


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

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out = self.mechanism(*self._heads(x, context), causal=context.causal, key_mask=context.key_mask)
        return self._merge(out)

    def extend(self, x: Tensor, context: Context, state: State | None) -> tuple[Tensor, State]:
        """The next tokens of a sequence whose past is in `state`."""
        out, state = self.mechanism.extend(*self._heads(x, context), state, key_mask=context.key_mask)
        return self._merge(out), state

    def _heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, v = self._split(self.q_proj(x)), self._split(self.v_proj(x))
        k = F.rms_norm(q, (self.head_dim,)) if self.k_proj is None else self._split(self.k_proj(x))
        return (q, k, v) if context.rotation is None else (context.rotation(q), context.rotation(k), v)

    def _split(self, x: Tensor) -> Tensor:
        """`[B, T, heads * D] -> [B, heads, T, D]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _merge(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2))
