"""One call of one attention layer: what it was given, what it returned, and what exact attention makes of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.mechanism import Mechanism, repeat_heads
from subquad.mechanisms.softmax import SoftmaxAttention, softmax_attention


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]`, key_mask bool `[B, S]`, True where a key is real.

    scale: of q.k, the usual one for a layer that has none. gaussian: the kernel is exp(-|x - y|^2 / 2).
    options: what else the layer was given, such as the `global_mask` of `window`.
    output: what the layer returned, `[B, H, T, Dv]`. output_is_exact: that is the output of exact attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    key_mask: Tensor | None
    scale: float
    gaussian: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output: Tensor | None = None
    output_is_exact: bool = False

    @property
    def real(self) -> Tensor:
        """bool `[B, T]`: rows that count."""
        if self.key_mask is None or self.q.shape[2] != self.k.shape[2]:
            return self.q.new_ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool)
        return self.key_mask

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        tensors = (self.q, self.k, self.v, self.key_mask, self.output)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def exact(self) -> Tensor:
        """The output of exact attention, `[B, H, T, Dv]`: the recorded one if it is that."""
        if self.output is not None and self.output_is_exact:
            return self.output
        q, k, scale = self._as_softmax()
        return softmax_attention(q, k, self.v, causal=self.causal, key_mask=self.key_mask, scale=scale)

    def exact_weights(self, rows: Tensor) -> Tensor:
        """Exact attention of the queries `rows`, `[B, H, len(rows), S]`."""
        q, k, scale = self._as_softmax()
        exact = SoftmaxAttention(q.shape[-1], scale=scale)
        return exact.attention_matrix(q, k, causal=self.causal, key_mask=self.key_mask, rows=rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Of the queries `rows` with all keys, visible or not, `[B, H, len(rows), S]`."""
        q, k, scale = self._as_softmax()
        return scale * q[:, :, rows] @ repeat_heads(k, q.shape[1]).mT

    def attend(self, mechanism: Mechanism) -> Tensor:
        """The output of `mechanism`, `[B, H, T, Dv]`."""
        return mechanism(self.q, self.k, self.v, causal=self.causal, key_mask=self.key_mask)

    def _as_softmax(self) -> tuple[Tensor, Tensor, float]:
        """The Gaussian kernel is the softmax kernel with one more dimension: x.y - |y|^2 / 2 = [x, 1].[y, -|y|^2/2]."""
        if not self.gaussian:
            return self.q, self.k, self.scale
        x, y = (t * self.scale**0.5 for t in (self.q, self.k))
        ones, norms = torch.ones_like(x[..., :1]), -y.square().sum(-1, keepdim=True) / 2
        return torch.cat([x, ones], -1), torch.cat([y, norms], -1), 1.0

    def replace(self, **inputs: Any) -> "Call":
        """With other inputs, and therefore without the output."""
        return dataclasses.replace(self, **inputs, output=None, output_is_exact=False)

    def answered(self, output: Tensor, *, exact: bool) -> "Call":
        """With the output of the layer; `exact`: that of exact attention."""
        return dataclasses.replace(self, output=output, output_is_exact=exact)

    def precise(self) -> "Call":
        """In float32 at least."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        return (
            self if self.q.dtype == dtype else self.replace(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))
        )

    def alone(self) -> "Call":
        """With copies of q, k and v that are views of more: a part of `mixed` would keep all heads in memory."""
        views = {
            name: x for name in ("q", "k", "v") if (x := getattr(self, name)).untyped_storage().nbytes() > x.nbytes
        }
        return dataclasses.replace(self, **{name: x.clone() for name, x in views.items()}) if views else self

    def sequences(self, index: Tensor) -> "Call":
        """Some of the sequences of the batch."""
        tensors = {name: getattr(self, name) for name in ("q", "k", "v", "key_mask", "output")}
        return dataclasses.replace(self, **{name: None if t is None else t[index] for name, t in tensors.items()})


class Layer(NamedTuple):
    """An attention layer of a model. mechanism: None for attention of Hugging Face."""

    name: str
    mechanism: Mechanism | None


Observe = Callable[[Layer, Call], None]
