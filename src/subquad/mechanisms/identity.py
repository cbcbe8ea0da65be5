"""No attention at all: every token keeps its own value. The lower bound in timing plots."""

from typing import NamedTuple

from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.mechanism import Mechanism, State, repeat_heads


class IdentityState(NamedTuple):
    """Real tokens seen so far, `[B]`."""

    length: Tensor


class IdentityAttention(Mechanism):
    """out_t = v_t, zero where the token is masked.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> bool((IdentityAttention(head_dim=4)(q, k, v) == v).all())
        True
    """

    name = "identity"

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}"

    @property
    def positional(self) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        out = repeat_heads(v, q.shape[1])
        return out.clone() if key_mask is None else out.masked_fill(~key_mask[:, None, :, None], 0)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        same = q_index[:, None, :, None] == k_index[:, None, None]
        return (same & seen).to(q.dtype).expand(*q.shape[:2], -1, -1)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, IdentityState]:
        self.check_extend(q, k, v, key_mask)
        past = states.state(self.name, state, IdentityState, {"length": states.counted(q.shape[0])}, k).length
        new = q.shape[2] if key_mask is None else key_mask.sum(-1)
        return self(q, k, v, causal=True, key_mask=key_mask), IdentityState(past + new)
