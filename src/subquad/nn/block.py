"""A pre-norm Transformer block around any mechanism."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from subquad import checks
from subquad.mechanism import State
from subquad.nn.self_attention import Context, LayerState, SelfAttention

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class MLP(nn.Module):
    """`down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, gated: bool = True, activation: str = "silu"):
        super().__init__()
        checks.choice("MLP", "activation", activation, tuple(ACTIVATIONS))
        self.activation = activation
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. The two branches are methods, for reversible stacks.

    Example:
        >>> import torch
        >>> Block(32, 4, attention="favor")(torch.randn(2, 10, 32), Context(causal=True)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int | None = None,
        *,
        gated: bool = True,
        activation: str = "silu",
        dropout: float = 0.0,
        eps: float = 1e-6,
        **attention_arguments: Any,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.attention = SelfAttention(hidden_size, num_heads, **attention_arguments)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.mlp = MLP(hidden_size, intermediate_size or 4 * hidden_size, gated=gated, activation=activation)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, context: Context) -> Tensor:
        return self.dropout(self.attention(self.attention_norm(x), context))

    def attend_next(
        self, x: Tensor, context: Context, state: State | LayerState | None
    ) -> tuple[Tensor, State | LayerState]:
        """The same for the next tokens of a sequence whose past is in `state`."""
        out, state = self.attention.extend(self.attention_norm(x), context, state)
        return self.dropout(out), state

    def transform(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(self.mlp_norm(x)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attend(x, context)
        return x + self.transform(x)

    def extend(
        self, x: Tensor, context: Context, state: State | LayerState | None
    ) -> tuple[Tensor, State | LayerState]:
        """The next tokens of a sequence whose past is in `state`."""
        out, state = self.attend_next(x, context, state)
        x = x + out
        return x + self.transform(x), state
