"""The contract every attention mechanism keeps. `subquad.testing.check_mechanism` tests all of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from subquad import checks
from subquad.features.buffers import Float32Buffers
from subquad.features.elementwise import at_least_tiny
from subquad.kernels.precision import without_autocast

# What `extend` carries from call to call: a NamedTuple of tensors, batch first in every one of them.
State = tuple[Tensor, ...]
SomeState = TypeVar("SomeState", bound=tuple)


class Mechanism(nn.Module, ABC):
    """Attention over `[B, H, T, D]` tensors; k and v may have fewer heads (GQA), v another last dim.

    `key_mask` is bool `[B, S]`, True where a token is real: it removes keys everywhere, never queries (positional
    mechanisms return zeros for masked tokens). A query that sees no key gets zeros. `causal=True` lets no output
    depend on a later token. Facts, calls, their checks, definition and states are one contract: hence many methods.
    """

    name: ClassVar[str]

    # Facts of a class; of an instance where they depend on its options, as in `mixed`.
    supports_causal: bool = True
    supports_bidirectional: bool = True
    supports_state: bool = True
    state_grows: bool = False
    float32_floor: float = 2**-23  # error that float32 outputs may have where the definition has less
    of_inner_products: bool = True  # weights are, or estimate, functions of q.k
    mask_kinds: tuple[str, ...] = ("right", "left", "holes")  # where a key_mask may have padding
    why_not_causal: str = "every output depends on all tokens"
    why_not_bidirectional: str = "no output depends on a later token"
    cross_attention_advice: str = ""  # ends the error of a positional mechanism that gets T != S

    head_dim: int

    @property
    def positional(self) -> bool:
        """Compares positions: self-attention only, and rows of masked tokens are zero."""
        return False

    @property
    def convex(self) -> bool:
        """Weights are never negative: outputs lie between the smallest and the largest value."""
        return True

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """Names of parameters that are one and the same in all layers of a model."""
        return ()

    @classmethod
    def layer_options(
        cls,
        options: dict[str, Any],
        *,
        key_heads: int,  # noqa: ARG003 - mechanisms with more to fit use it
        max_length: int | None,  # noqa: ARG003 - and this
    ) -> dict[str, Any]:
        """`options`, and what this mechanism must know of the layer around it."""
        return options

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """The fast way. q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]` -> `[B, H, T, Dv]`."""

    @abstractmethod
    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        """The definition: normalised weights `[B, H, R, S]` of pairs that are `seen` `[B or 1, 1, R, S]`, 0 for others.

        q `[B, H, R, D]`, k `[B, H, S, D]`: as many heads, masked keys zeroed. q_index, k_index `[B or 1, R or S]`:
        positions among the real tokens, for mechanisms that compare positions.
        """

    @property
    def supports_join(self) -> bool:
        """`join_states` works. A mechanism whose state grows has one of its own, or none."""
        own = type(self).join_states is not Mechanism.join_states
        return self.supports_state and (own or not self.state_grows)

    def join_states(self, states: Sequence[State]) -> State:
        """One state of all sequences of these, in their order, each of which goes on as it would alone.

        They may be at different positions. The state is no larger than the longest sequence needs: of a single one,
        too, whose longer sequences were dropped.
        """
        if not self.supports_join:
            raise checks.cannot_join(self.name, self.supports_state)
        return type(states[0])(*(torch.cat(parts) for parts in zip(*states, strict=True)))

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        """Raises if this mechanism was made for another number of heads, or for shorter sequences."""

    def check_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None) -> None:
        """Raises if `forward` cannot take these inputs; every `forward` begins with it."""
        checks.qkv(self.name, q, k, v)
        self._check_call(q, k, causal, key_mask)

    def check_matrix(self, q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, rows: Tensor | None) -> None:
        """The same for `attention_matrix`, which takes no values."""
        checks.qk(self.name, q, k)
        self._check_call(q, k, causal, key_mask)
        checks.rows(self.name, rows, q)

    def check_extend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        """The same for `extend`; its state is checked by what the mechanism declares of it (`checks/states.py`)."""
        checks.qkv(self.name, q, k, v)
        if not self.supports_state:
            raise checks.cannot_extend(self.name)
        checks.head_dim(self.name, self.head_dim, q)
        checks.extend_lengths(self.name, q, k)
        checks.key_mask(self.name, key_mask, k)
        self.check_heads(q, k)

    def _check_call(self, q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> None:
        """All but dtypes and shapes of the tensors themselves."""
        checks.head_dim(self.name, self.head_dim, q)
        if causal and not self.supports_causal:
            raise checks.cannot_be_causal(self.name, self.why_not_causal)
        checks.causal_lengths(self.name, causal, q, k)
        if not causal and not self.supports_bidirectional:
            raise checks.only_causal(self.name, self.why_not_bidirectional)
        if self.positional:
            checks.self_attention(self.name, q, k, self.cross_attention_advice)
        checks.key_mask(self.name, key_mask, k)
        if self.mask_kinds == ("right",):
            checks.right_padding(self.name, key_mask)
        self.check_heads(q, k)

    @without_autocast
    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The weights this mechanism implies, by its dense formula: `[B, H, T, S]`, or `[B, H, len(rows), S]`."""
        self.check_matrix(q, k, causal, key_mask, rows)
        rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
        keys = torch.arange(k.shape[2], device=q.device)
        seen = (keys <= rows[:, None] if causal else torch.ones_like(keys <= rows[:, None]))[None, None]
        q_index, k_index = rows[None], keys[None]
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
            seen, k_index = seen & key_mask[:, None, None], real_index(key_mask, k)
            if self.positional:
                seen, q_index = seen & key_mask[:, None, rows, None], k_index[:, rows]
        q = q[:, :, rows]
        return self.dense_weights(q, repeat_heads(k, q.shape[1]), seen, q_index, k_index)

    @without_autocast
    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """The definition: quadratic, in the dtype of the inputs, differentiable any number of times."""
        weights = self.attention_matrix(q, k, causal=causal, key_mask=key_mask)
        if key_mask is not None:  # 0 * NaN is NaN, and a masked key must not matter whatever it holds
            v = v.masked_fill(~key_mask[:, None, :, None], 0)
        return weights @ repeat_heads(v, q.shape[1])

    @abstractmethod
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Causal attention of T >= 1 new tokens to themselves and to all tokens in `state`, which is left unchanged.

        Any split of a sequence into pieces gives what `forward(causal=True)` gives on the whole. key_mask `[B, T]`.
        """


class RandomFeatures(Float32Buffers, ABC):
    """A mechanism that may draw something at random."""

    weight: Tensor | None  # what `redraw` draws

    @abstractmethod
    def redraw(self, seed: int) -> None:
        """Fresh random features, in place."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """The features of the constructor's seed."""


def reorder_state(state: SomeState, index: Tensor) -> SomeState:
    """The state of the sequences `index` (beam search, dropping finished sequences); of a layer, too."""
    return type(state)(*(part[index] if isinstance(part, Tensor) else reorder_state(part, index) for part in state))


def state_bytes(state: tuple) -> int:
    """Memory that a state holds; of a layer's, too."""
    return sum(part.nbytes if isinstance(part, Tensor) else state_bytes(part) for part in state)


def outermost(model: nn.Module, kinds: type | tuple[type, ...] = Mechanism) -> list[tuple[str, Mechanism]]:
    """Names and mechanisms of these kinds, in order, but none that is inside another one: not the parts of `mixed`."""
    found: list[tuple[str, Mechanism]] = []
    for name, module in model.named_modules():
        outer = f"{found[-1][0]}." if found and found[-1][0] else ""  # the model itself has no name
        inside = bool(found) and name.startswith(outer)
        if isinstance(module, Mechanism) and isinstance(module, kinds) and not inside:
            found.append((name, module))
    return found


# What dense definitions share -----------------------------------------------------------------------------------------


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, K, S, D] -> [B, heads, S, D]`: each key head serves `heads / K` query heads in a row."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def masked_softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the visible keys; zeros in a row that sees none."""
    logits = logits.masked_fill(~seen, -torch.inf)
    top = logits.amax(-1, keepdim=True).detach()
    weights = (logits - top.masked_fill(top == -torch.inf, 0)).exp()
    return normalised(weights)


def normalised(weights: Tensor) -> Tensor:
    """Rows divided by their sums; a row whose sum is too small to count is one of zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(at_least_tiny(total), total, torch.inf)


def log_sum_of_products(log_phi: Tensor, log_psi: Tensor) -> Tensor:
    """log sum_r phi_r psi_r of all pairs, `[B, H, T, S]`, from `[B, H, T or S, M]`; T x S x M at once is too much."""
    out = [(log_phi[:, :, t, None] + log_psi).logsumexp(-1) for t in range(log_phi.shape[2])]
    return torch.stack(out, dim=2) if out else log_phi.new_zeros(*log_phi.shape[:3], log_psi.shape[2])


def real_index(key_mask: Tensor | None, k: Tensor) -> Tensor:
    """Each token's position among the real tokens of its sequence, `[B or 1, S]`; meaningless for masked ones."""
    if key_mask is None:
        return torch.arange(k.shape[2], device=k.device)[None]
    return key_mask.cumsum(-1) - 1
