"""Gated linear attention and the delta rule, in plain torch, to compare with: clear rather than fast.

Both take the place of `SelfAttention` in a block, with the same projections and short convolution. A state of D x D
numbers per head; causal, whole sequences without padding.

Letters: B batch, H heads, T tokens, D head dim, C tokens per chunk.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.nn import Context, ShortConvolution

CHUNK = 32


class ReferenceAttention(nn.Module, ABC):
    """Projections, a short convolution on queries and keys, a gate of its own, and a norm of the output."""

    def __init__(self, hidden_size: int, num_heads: int, short_conv: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )
        self.gate = nn.Linear(hidden_size, self.gates)
        self.short_conv = ShortConvolution(2 * hidden_size, short_conv) if short_conv else None

    @property
    @abstractmethod
    def gates(self) -> int:
        """Numbers that are projected from each token beside q, k and v."""

    @property
    def state_numbers(self) -> int:
        """Of a sequence."""
        return self.num_heads * self.head_dim**2

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert context.causal
        qk = torch.cat([self.q_proj(x), self.k_proj(x)], -1)
        qk = qk if self.short_conv is None else self.short_conv(qk, causal=True)
        q, k = qk.chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, self.v_proj(x)))
        gate = self.gate(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        length = q.shape[2]
        q, k, v, gate = (F.pad(t, (0, 0, 0, -length % CHUNK)) for t in (q, k, v, gate))
        out = self.attend(q, k, v, gate)[:, :, :length]
        return self.o_proj(F.rms_norm(out, out.shape[-1:]).transpose(1, 2).flatten(-2))

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """q, k, v `[B, H, T, D]`, gate `[B, H, T, gates per head]` -> `[B, H, T, D]`; T is a multiple of CHUNK."""


class GatedLinearAttention(ReferenceAttention):
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, a_t = sigmoid(gate)^(1/16) (Yang et al. 2023)."""

    @property
    def gates(self) -> int:
        return self.num_heads * self.head_dim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for qc, kc, vc, gc in zip(*(t.split(CHUNK, 2) for t in (q, k, v, gate)), strict=True):
            decay = (F.logsigmoid(gc) / 16).cumsum(2)  # log of the product of a up to here; at least -32 / 16 * |gate|
            qd, kd = qc * decay.exp(), kc * (-decay).exp()
            outs.append(qd @ state + (qd @ kd.mT).tril() @ vc)
            last = decay[:, :, -1:]
            state = last.mT.exp() * state + (kc * (last - decay).exp()).mT @ vc
        return torch.cat(outs, 2)


class DeltaRule(ReferenceAttention):
    """S_t = S_{t-1} + b_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = S_t^T q_t: a value replaces what its key had before it
    (Yang et al. 2024)."""

    @property
    def gates(self) -> int:
        return self.num_heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        q, k = (F.normalize(F.silu(t), dim=-1) for t in (q, k))
        beta, state, outs = gate.sigmoid(), q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        for qc, kc, vc, bc in zip(*(t.split(CHUNK, 2) for t in (q, k, v, beta)), strict=True):
            lower = eye + (bc * (kc @ kc.mT)).tril(-1)
            new = torch.linalg.solve_triangular(lower, bc * (vc - kc @ state), upper=False)  # what each token writes
            outs.append(qc @ state + (qc @ kc.mT).tril() @ new)
            state = state + kc.mT @ new
        return torch.cat(outs, 2)


REFERENCES: dict[str, type[ReferenceAttention]] = {"gla": GatedLinearAttention, "deltanet": DeltaRule}
