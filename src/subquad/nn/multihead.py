"""`torch.nn.MultiheadAttention`'s call signature and weights, with any mechanism inside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import layers as checks
from subquad.nn.self_attention import layer_mechanism


class MultiheadAttention(nn.Module):
    """Takes the place of `nn.MultiheadAttention`: same arguments, same names in the state dict.

    Differences: `need_weights` is False by default, because weights are quadratic. An `attn_mask` may only be the
    causal one, and attention dropout must be 0: the rest raises, as no sub-quadratic mechanism can honour it.

    Args:
        attention: name of the mechanism; further keyword arguments are its options.

    Example:
        >>> theirs = nn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours = MultiheadAttention.from_torch(theirs, "softmax")
        >>> x = torch.randn(2, 10, 32)
        >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
        True
    """

    # nn.TransformerEncoderLayer asks this before it takes a fused path at inference that would bypass the mechanism
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "favor",
        layer: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.heads(embed_dim, num_heads, num_heads, None)
        checks.multihead_options(dropout, add_bias_kv, add_zero_attn)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.head_dim, self.dropout = embed_dim // num_heads, dropout
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.packed = self.kdim == self.vdim == embed_dim
        if self.packed:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.mechanism = layer_mechanism(attention, options, head_dim=self.head_dim, key_heads=num_heads, layer=layer)
        self.reset_parameters()
        self.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_keep_own_features)

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, attention: str = "favor", *, layer: int = 0, **options: Any
    ) -> "MultiheadAttention":
        """A copy of `module` with another mechanism inside; its dtype, device, mode and weights are kept."""
        made = cls(
            module.embed_dim,
            module.num_heads,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            attention=attention,
            layer=layer,
            **options,
        ).to(module.out_proj.weight)
        made.load_state_dict(module.state_dict())
        return made.train(module.training)

    def reset_parameters(self) -> None:
        for weight in [self.in_proj_weight] if self.packed else self._projections():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query `[T, B, E]`, `[B, T, E]` (batch_first) or `[T, E]`; key_padding_mask `[B, S]`, True = padding.

        Returns the output and, if asked for, the weights the mechanism implies: quadratic, for looking at.
        """
        checks.multihead_inputs(self, query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = checks.causal_attn_mask(attn_mask, is_causal, query, key)
        key_mask = checks.real_from_padding(key_padding_mask)
        q, k, v = self._heads(query, key, value)
        out = self.mechanism(q, k, v, causal=causal, key_mask=key_mask)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        weights = self.mechanism.attention_matrix(q, k, causal=causal, key_mask=key_mask) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projections(self) -> tuple[Tensor, ...]:
        if self.packed:
            return self.in_proj_weight.chunk(3)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _heads(self, *inputs: Tensor) -> list[Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(inputs, self._projections(), biases, strict=True)
        ]


def _keep_own_features(module: MultiheadAttention, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Weights of a torch model hold no random features: loading them strictly keeps those drawn here."""
    own = {f"{prefix}mechanism.{name}": tensor for name, tensor in module.mechanism.state_dict().items()}
    if not any(name in state for name in own):
        state.update(own)
