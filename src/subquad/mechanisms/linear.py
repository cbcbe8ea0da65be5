"""Linear attention: a positive feature map in place of the exponential (Linear Transformer, generalised Performer)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.errors import SubquadError
from subquad.features.draws import check_coupling, gaussian_rows
from subquad.features.elementwise import ELEMENTWISE, at_least_tiny, by_largest, without_tiny
from subquad.features.positive import FeatureMap
from subquad.kernels import compensated, engines
from subquad.kernels.blocks import with_ones
from subquad.kernels.compensated import Total, scaled_low
from subquad.kernels.cpu.plain_step import takes_plain_step
from subquad.kernels.favor.inputs import FavorOptions
from subquad.kernels.favor.operator import favor_attention
from subquad.kernels.linear import native
from subquad.kernels.linear import operator as linear_operator
from subquad.kernels.linear.inputs import LinearOptions
from subquad.kernels.precision import without_autocast
from subquad.kernels.problem import FLOOR
from subquad.kernels.projection import project
from subquad.mechanism import (
    Mechanism,
    RandomFeatures,
    State,
    log_sum_of_products,
    masked_softmax,
    normalised,
    repeat_heads,
)
from subquad.mechanisms.favor_state import FavorState

FEATURE_MAPS = ("elu1", "relu", "softplus", "relu2", "exp")

PhiFunction = Callable[[Tensor], Tensor]


class LinearState(NamedTuple):
    """Constant in size. far_sum `[B, K, M, Dv + 1]`: sum of phi(k) [v, 1]; far_max `[B, K, M or 1]`: its log unit.

    far_low, like far_sum: what rounding left out of it, so that a million steps lose nothing.
    """

    far_max: Tensor
    far_sum: Tensor
    far_low: Tensor


@without_autocast
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    feature_map: str | PhiFunction = "elu1",
    projection: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    """out_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), over s <= t if causal.

    Cost: O(T M Dv) time, O(T D) memory, forward and backward. It is its own kernel; it does not approximate softmax.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, S, D]`; v: `[B, K, S, Dv]`, H a multiple of K.
        feature_map: "elu1", "relu", "softplus", "relu2", "exp", or a function `[..., D] -> [..., M]` with outputs >= 0
            (its outputs are then kept for the backward).
        projection: `[K or 1, M, D]`: phi acts on `projection @ x`, x = sqrt(scale) q, as in the Performer's generalised
            attention. Without it phi acts on q and k as they are.
        scale: only with a projection; `1 / sqrt(D)` unless given.
        backend: "cpu" for the C++ engine (float32 or less, on CPUs), "torch", or "auto": the first that can.
        chunk: tokens done at once; speed only.
    Returns:
        `[B, H, T, Dv]`. A row whose weights are all zero (relu) is zero.
    Example:
        >>> linear_attention(*torch.randn(3, 1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    checks.qkv("linear", q, k, v)
    checks.key_mask("linear", key_mask, k)
    engines.backend("linear", backend)
    checks.causal_lengths("linear", causal, q, k)
    if projection is not None:
        checks.projection("linear", projection, k)
    elif scale is not None:
        raise checks.only_with_projection("scale")
    root = 1.0 if projection is None else checks.scale("linear", scale, q.shape[-1]) ** 0.5
    options = _options(feature_map, root, checks.optional_count("linear", "chunk", chunk), backend)
    phi = _Phi(feature_map, projection, options)
    return phi.attend(q, k, v, causal, key_mask, None)[0]


def _options(feature_map: str | PhiFunction, root: float, chunk: int | None, backend: str) -> LinearOptions:
    if not callable(feature_map) and feature_map not in FEATURE_MAPS:
        raise checks.not_a_feature_map(feature_map, FEATURE_MAPS)
    name = "identity" if callable(feature_map) else feature_map  # engines get what a function made of the inputs
    return LinearOptions(name, root, chunk or 0, backend)


class _Phi:
    """A feature map with its projection, and the engine that serves it."""

    def __init__(self, feature_map: str | PhiFunction, projection: Tensor | None, options: LinearOptions) -> None:
        self.feature_map, self.projection, self.options = feature_map, projection, options

    @property
    def in_log_space(self) -> bool:
        """exp(x) overflows long before its ratios do, so it never leaves the logarithm."""
        return self.feature_map == "exp"

    def argument(self, x: Tensor) -> Tensor:
        """What phi is applied to."""
        x = x * self.options.root
        return x if self.projection is None else project(x, _for_heads(self.projection.to(x.dtype), x))

    def __call__(self, x: Tensor) -> Tensor:
        x = self.argument(x)
        if callable(self.feature_map):
            return without_tiny(checks.features_of("linear", self.feature_map(x), x))
        return ELEMENTWISE[self.feature_map].phi(x)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, state: LinearState | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, and when causal the state after the last token."""
        tensors = {"alive": key_mask}
        if state is not None:
            tensors |= {"far_max": state.far_max, "far_sum": state.far_sum}
        if self.in_log_space:
            return favor_attention(q, k, v, self._as_map(k), self._as_favor(), causal=causal, **tensors)
        if callable(self.feature_map):
            dtype = torch.promote_types(q.dtype, torch.float32)
            if key_mask is not None:  # the function must not see what a masked key holds
                k = k.masked_fill(~key_mask[:, None, :, None], 0)
            phi_q, phi_k, values = self(q).to(dtype), self(k).to(dtype), v.to(dtype)
            options = self.options._replace(root=1.0)
            out, far_max, far_sum = linear_operator.linear_attention(
                phi_q, phi_k, values, options, causal=causal, **tensors
            )
            return out.to(q.dtype), far_max, far_sum
        tensors["weight"] = self.projection
        return linear_operator.linear_attention(q, k, v, self.options, causal=causal, **tensors)

    def log_step(
        self, step: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, state: LinearState
    ) -> tuple[Tensor, LinearState]:
        """One token of the exponential map, by an engine's step of FAVOR: there are no near blocks and no sinks."""
        empty_k, empty_v, start = k[:, :, :0], v[:, :, :0], k.new_zeros(k.shape[0], dtype=torch.int64)
        past = FavorState(start, empty_k, empty_v, empty_k, empty_v, *state)
        out, new = step(q, k, v, self._as_map(k), real, past, self._as_favor())
        return out, LinearState(*FavorState(*new)[-3:])

    def _as_favor(self) -> FavorOptions:
        o = self.options
        return FavorOptions(near=0, sinks=0, scale=o.root**2, gaussian=False, chunk=o.chunk, backend=o.backend)

    def _as_map(self, k: Tensor) -> FeatureMap:
        weight = self.projection
        if weight is None:
            weight = torch.eye(k.shape[-1], dtype=torch.float32, device=k.device)[None]
        return FeatureMap(weight, weight, weight.new_zeros(weight.shape[:2]), rule="none")


def _for_heads(weight: Tensor, x: Tensor) -> Tensor:
    """A weight per key head, repeated for the query heads that share it."""
    return weight if weight.shape[0] == 1 else weight.repeat_interleave(x.shape[1] // weight.shape[0], 0)


def _fields(batch: int, heads: int, maxima: int | str, features: int | str, value_dim: int) -> states.Fields:
    """What a state's tensors must be."""
    far_sum = states.summed(batch, heads, features, value_dim + 1)
    return {"far_max": states.summed(batch, heads, maxima, least=FLOOR), "far_sum": far_sum, "far_low": far_sum}


_kept_fields = functools.lru_cache(maxsize=64)(_fields)


class LinearAttention(RandomFeatures, Mechanism):
    """Attention with the kernel phi(q).phi(k): an RNN when decoding.

    Args:
        head_dim: D of the queries and keys.
        feature_map: as in `linear_attention`.
        num_features: rows of a random projection before phi (the Performer's generalised attention); None for none.
        coupling, num_heads, scale, seed: of that projection, as in `FavorAttention`; by default "orthogonal", one draw
            for all heads, `1 / sqrt(head_dim)`, 0.

    Example:
        >>> LinearAttention(head_dim=4)(*torch.randn(3, 1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "linear"
    of_inner_products = False
    weight: Tensor | None

    def __init__(
        self,
        head_dim: int,
        *,
        feature_map: str | PhiFunction = "elu1",
        num_features: int | None = None,
        coupling: str | None = None,
        num_heads: int | None = None,
        scale: float | None = None,
        seed: int | None = None,
        backend: str = "auto",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.num_features = checks.optional_count(self.name, "num_features", num_features)
        self.num_heads = checks.optional_count(self.name, "num_heads", num_heads)
        self.coupling = coupling or "orthogonal"
        check_coupling(self.name, self.coupling, self.head_dim)
        engines.backend(self.name, backend)
        chunk = checks.optional_count(self.name, "chunk", chunk)
        projected = num_features is not None
        for option, value in (("coupling", coupling), ("num_heads", num_heads), ("scale", scale), ("seed", seed)):
            if value is not None and not projected:
                raise checks.only_with_projection(option)
        root = checks.scale(self.name, scale, head_dim) ** 0.5 if projected else 1.0
        self.options = _options(feature_map, root, chunk, backend)
        self.feature_map = feature_map
        self.seed = seed or 0
        self.register_buffer("weight", self._draw(self.seed) if projected else None)

    @property
    def chunk(self) -> int | None:
        """Tokens done at once, None to choose; speed only."""
        return self.options.chunk or None

    @chunk.setter
    def chunk(self, value: int | None) -> None:
        self.options = self.options._replace(chunk=checks.optional_count(self.name, "chunk", value) or 0)

    @property
    def _phi(self) -> _Phi:
        return _Phi(self.feature_map, self.weight, self.options)

    def extra_repr(self) -> str:
        shown = f"head_dim={self.head_dim}, feature_map={self.feature_map!r}"
        if self.num_features is None:
            return shown
        projection = f"num_features={self.num_features}, coupling={self.coupling!r}, scale={self.options.root**2:.4g}"
        return f"{shown}, {projection}, num_heads={self.num_heads}"

    def redraw(self, seed: int) -> None:
        """A fresh random projection, in place. States made before belong to the old one."""
        if self.weight is None:
            raise checks.nothing_to_redraw()
        self.weight.copy_(self._draw(seed))

    def reset_parameters(self) -> None:
        """The projection of the constructor's seed, for modules materialised from the meta device."""
        if self.weight is not None:
            self.redraw(self.seed)

    def _draw(self, seed: int) -> Tensor:
        assert self.num_features is not None
        generator = torch.Generator("cpu").manual_seed(checks.seed(self.name, seed))
        draws = (
            gaussian_rows(self.num_features, self.head_dim, self.coupling, generator)
            for _ in range(self.num_heads or 1)
        )
        return torch.stack(list(draws)).float().to(torch.get_default_device())

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        return self._phi.attend(q, k, v, causal, key_mask, None)[0]

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, LinearState]:
        if key_mask is None and (done := self._plain_step(q, k, v, state)):
            return done
        self.check_extend(q, k, v, key_mask)
        phi = self._phi
        past = self._checked_state(phi, k, v, state)
        if q.shape[2] == 1:
            return self._step(phi, q, k, v, past, key_mask)
        out, far_max, far_sum = phi.attend(q, k, v, True, key_mask, past)
        low = torch.zeros_like(far_sum) if past is None else scaled_low(past.far_low, past.far_max, far_max)
        return out, LinearState(far_max, far_sum, low)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        phi = self._phi
        if phi.in_log_space:
            log_phi, log_psi = phi.argument(q), phi.argument(k)
            return masked_softmax(log_sum_of_products(log_phi, log_psi), seen)
        return normalised(by_largest(phi(q)) @ phi(k).mT * seen)

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        if self.weight is not None:
            checks.projection(self.name, self.weight, k)

    def _checked_state(self, phi: _Phi, k: Tensor, v: Tensor, state: State | None) -> LinearState | None:
        if state is None:
            return None
        features = "M" if callable(self.feature_map) else self.num_features or self.head_dim
        maxima = features if phi.in_log_space else 1
        make = _fields if torch.compiler.is_compiling() else _kept_fields  # a traced call has no memory
        batch, heads = k.shape[:2]
        return states.state(self.name, state, LinearState, make(batch, heads, maxima, features, v.shape[-1]), k)

    def _plain_step(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, LinearState] | None:
        """One token more, if the C++ engine takes it and the state as they are; else None, and nothing happened."""
        name = self.feature_map
        if callable(name) or name not in ELEMENTWISE:
            return None
        if not takes_plain_step(self.options.backend, q, k, v, state, LinearState):
            return None
        weight, features = self._buffers["weight"], self.num_features or self.head_dim  # attributes of modules are slow
        try:
            out, new = native.plain_step(q, k, v, weight, features, None, cast(LinearState, state), self.options)
        except SubquadError:
            return None
        return out, LinearState(*new)

    def _native_step(
        self, phi: _Phi, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState] | None:
        past, operation = () if state is None else state, "favor" if phi.in_log_space else "linear"
        step = engines.step_of(operation, self.options.backend, q, k, v, self.weight, *past)
        if step is None or callable(self.feature_map):
            return None
        real = None if key_mask is None else key_mask[:, 0]
        if state is None:
            features, dims = self.num_features or self.head_dim, k.shape[:2]
            lowest = (FLOOR, features) if phi.in_log_space else (0.0, 1)
            far_max = k.new_full((*dims, lowest[1]), lowest[0], dtype=torch.float32)
            zeros = k.new_zeros(*dims, features, v.shape[-1] + 1, dtype=torch.float32)
            state = LinearState(far_max, zeros, zeros)
        if phi.in_log_space:
            return phi.log_step(step, q, k, v, real, state)
        features = self.num_features or self.head_dim
        out, new = step(q, k, v, self.weight, features, real, state, self.options)
        return out, LinearState(*new)

    def _step(
        self, phi: _Phi, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """One new token, in a handful of small operations."""
        checks.no_transforms(q, k, v)
        if native := self._native_step(phi, q, k, v, state, key_mask):
            return native
        dtype = torch.promote_types(q.dtype, torch.float32)
        own_dtype = callable(self.feature_map)  # a function gets what it would get in the definition
        x, y = (q, k) if own_dtype else (q.to(dtype), k.to(dtype))
        values = with_ones(v.to(dtype))
        if key_mask is not None:
            y, values = (t.masked_fill(~key_mask[:, None, :, None], 0) for t in (y, values))
        if phi.in_log_space:
            query, key = phi.argument(x), phi.argument(y)
            if key_mask is not None:
                key = key.masked_fill(~key_mask[:, None, :, None], FLOOR)
        else:
            query, key = phi(x).to(dtype), phi(y).to(dtype)
        heads, features = k.shape[:2], key.shape[-1]
        if state is None:
            far_max = key.new_full((*heads, features), FLOOR) if phi.in_log_space else key.new_zeros(*heads, 1)
            zeros = key.new_zeros(*heads, features, values.shape[-1])
            state = LinearState(far_max, zeros, zeros)
        far_max, total, decay = state.far_max, Total(state.far_sum, state.far_low), None
        checks.features_of_state(self.name, total.high, features)
        if phi.in_log_space:
            grown = torch.maximum(far_max, key[:, :, 0]).detach()
            decay = (far_max - grown).exp()[..., None]
            key, far_max = (key - grown[:, :, None]).exp(), grown
            query = query + repeat_heads(grown[:, :, None], q.shape[1])
            query = (query - query.amax(-1, keepdim=True).detach()).exp()
        total = compensated.add(total, key.mT @ values, decay)  # a masked token's values, and its 1, are zero
        rows = query.reshape(*heads, -1, features)  # the heads that share a key head
        numerator = by_largest(rows) @ total.high
        weight = numerator[..., -1:]
        out = numerator[..., :-1] / torch.where(at_least_tiny(weight), weight, torch.inf)
        return out.reshape(*q.shape[:3], -1).to(q.dtype), LinearState(far_max, *total)
