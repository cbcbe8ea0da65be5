"""Longformer's self-attention layer: windows, and global tokens with projections of their own."""

from collections.abc import Sequence

from torch import Tensor, nn

from subquad.checks import layers as checks
from subquad.mechanisms.window import WindowAttention


class LongformerSelfAttention(nn.Module):
    """x `[B, T, hidden_size]` -> the same shape. Names, shapes and results are those of Hugging Face's layer.

    What global tokens see goes through `query_global`, `key_global` and `value_global`; all else, the global tokens'
    own keys and values for others included, through `query`, `key` and `value`. Any length, no padding to windows.

    Example:
        >>> import torch
        >>> layer = LongformerSelfAttention(32, 4, window=8)
        >>> first = torch.arange(10).expand(2, -1) < 1
        >>> layer(torch.randn(2, 10, 32), global_mask=first).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, window: int = 256, dilation: int | Sequence[int] = 1
    ) -> None:
        super().__init__()
        checks.heads(hidden_size, num_heads, num_heads, None)
        self.head_dim = hidden_size // num_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.mechanism = WindowAttention(self.head_dim, window, dilation=dilation)

    def forward(
        self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None, global_mask: Tensor | None = None
    ) -> Tensor:
        """key_mask `[B, T]`, True = real; global_mask `[B, T]`, True = sees all and is seen by all."""
        local = self._heads(x, self.query, self.key, self.value)
        own = None
        if global_mask is not None:
            own = self._heads(x, self.query_global, self.key_global, self.value_global)
        out = self.mechanism(*local, causal=causal, key_mask=key_mask, global_mask=global_mask, global_qkv=own)
        return out.transpose(1, 2).flatten(-2)

    def _heads(self, x: Tensor, *projections: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections)
        return q, k, v
