"""`torch.nn.TransformerEncoderLayer`, with any mechanism inside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.nn.block import ACTIVATIONS
from subquad.nn.multihead import MultiheadAttention


class TransformerEncoderLayer(nn.Module):
    """Same arguments, same names in the state dict as torch's, plus the name and options of a mechanism.

    `dropout` acts on the residual branches and inside the MLP as in torch; attention weights are never dropped.
    `nn.TransformerEncoder` copies the layer it is given, random features included: `redraw` those of each copy, or make
    layers with `layer=0, 1, ...` yourself.

    Example:
        >>> import torch
        >>> layer = TransformerEncoderLayer(32, 4, batch_first=True, attention="favor", num_features=64)
        >>> encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> encoder(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = "favor",
        layer: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            checks.choice("TransformerEncoderLayer", "activation", activation, tuple(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.norm_first = norm_first
        self.self_attn = MultiheadAttention(
            d_model, nhead, bias=bias, batch_first=batch_first, attention=attention, layer=layer, **options
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src `[T, B, E]`, or `[B, T, E]` with batch_first; masks as in `MultiheadAttention`."""
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        if self.norm_first:
            src = src + self._attend(self.norm1(src), masks)
            return src + self._transform(self.norm2(src))
        src = self.norm1(src + self._attend(src, masks))
        return self.norm2(src + self._transform(src))

    def _attend(self, x: Tensor, masks: dict[str, Any]) -> Tensor:
        return self.dropout(self.self_attn(x, x, x, **masks)[0])

    def _transform(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))
