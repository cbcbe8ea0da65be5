"""FAVOR+ (Performer) with exact near blocks and sinks under one normaliser.

A query attends exactly, by exp(q.k), to the first `sinks` real tokens, to its own block of `near` tokens and to `reach`
blocks on either side of it (causal: before it); to all others, the far field, by random or learned features. `near=0,
sinks=0` is the estimator of the paper. Blocks and sinks are counted in real tokens, so padding moves no border.
"""

import warnings
from typing import cast

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import favor as favor_checks
from subquad.checks import states
from subquad.errors import UncalibratedWarning
from subquad.features.buffers import LayerFeatures
from subquad.features.drawn import DRAWN, FITTED, DrawnFeatures
from subquad.features.draws import check_coupling
from subquad.features.learned import LEARNED, ExponentialFeatures, HedgehogFeatures, learned_features
from subquad.features.names import current_name
from subquad.features.positive import FeatureMap
from subquad.features.trigonometric import trigonometric_features, trigonometric_log_weight
from subquad.kernels.linear.inputs import LinearOptions
from subquad.kernels.linear.operator import linear_attention
from subquad.kernels.precision import without_autocast
from subquad.mechanism import (
    Mechanism,
    RandomFeatures,
    State,
    log_sum_of_products,
    masked_softmax,
    normalised,
)
from subquad.mechanisms import favor_state
from subquad.mechanisms.favor_attend import attend, make_options
from subquad.mechanisms.favor_state import FavorState, map_heads

ESTIMATORS = (*DRAWN, *LEARNED)


@without_autocast
def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    near: int = 64,
    reach: int = 1,
    sinks: int = 4,
    far: bool = True,
    kernel: str = "softmax",
    scale: float | None = None,
    backend: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    """Softmax attention, exact near and at the sinks, estimated far away.

    Cost: O(T M D) time, O(T D) memory, forward and backward.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, S, D]`; v: `[B, K, S, Dv]`, H a multiple of K.
        feature_map: from `subquad.features.draw_feature_map`; its tensors may need gradients.
        key_mask: bool `[B, S]`, True where the token is real. With near > 0, rows of masked tokens are
            zero; with near=0 they attend to the real ones.
        near: tokens per block, 0 for none (needed for cross-attention).
        reach: blocks on either side of a query's own that are exact, too.
        far: False for near blocks and sinks alone, as if there were nothing else.
        kernel: "softmax" exp(q.k), or "gaussian" exp(-|q - k|^2 / 2), both of scaled q, k.
        scale: of the logits, `1 / sqrt(D)` unless given.
        backend: "cpu" for the C++ engine (float32 or less, on CPUs), "torch", or "auto": the first that can.
        chunk: tokens done at once; speed only.
    Returns:
        `[B, H, T, Dv]`.
    Example:
        >>> from subquad.features import draw_feature_map
        >>> favor_attention(*torch.randn(3, 1, 2, 5, 4), draw_feature_map(head_dim=4)).shape
        torch.Size([1, 2, 5, 4])
    """
    checks.qkv("favor", q, k, v)
    options = make_options(near, sinks, kernel, scale, backend, chunk, head_dim=q.shape[-1], reach=reach, far=far)
    checks.feature_map("favor", feature_map, q, k)
    checks.key_mask("favor", key_mask, k)
    checks.causal_lengths("favor", causal, q, k)
    if options.near:
        checks.self_attention("favor", q, k, FavorAttention.cross_attention_advice)
    return attend(options, q, k, v, feature_map, causal, key_mask)


class FavorAttention(RandomFeatures, Mechanism):
    """Attention of a Performer, made exact where that matters most.

    Beside the contract it has the life of its features (set, adopt, redraw) and properties that callers ask for, hence
    more methods than other mechanisms.

    Args:
        head_dim: D of the queries and keys.
        num_features: M. The far field's error falls slowly with it, time grows with it.
        near: tokens per exact block; 0 for none, which cross-attention needs.
        reach: blocks on either side of the own one that are exact (causal: before it). A window of W tokens in small
            blocks, near=16, reach=W/16, keeps W + 16 tokens, of which a query sees all but 8 on average.
        sinks: leading tokens that every query sees exactly.
        far: False for near blocks and sinks alone, under a normaliser of their own; features stay as they are.
        estimator: of the far field. Drawn from N(0, I): "positive" (FAVOR+), "hyperbolic" (rows with both signs),
            "trigonometric" (signed; for study, only with near=0, sinks=0). Drawn from what `subquad.calibrate` found:
            "optimal" (FAVOR++), "sharp" (FAVOR#), "calibrated" (the best of them). Learned: "hedgehog", "exponential".
        coupling: of drawn rows: "orthogonal", "iid", "simplex" or "hadamard" (head_dim 32, 64, ...).
        kernel: "softmax" or "gaussian".
        num_heads: None: one map for all heads. Heads of k: a map for each key head, which its query heads share. Heads
            of q: a map for each query head, and keys are repeated for it.
        transform: with "calibrated", calibration may also stretch queries and shrink keys, which leaves q.k as it is.
        seed: of the draw. Only `redraw` changes it.

    Example:
        >>> attention = FavorAttention(head_dim=4, num_features=32)
        >>> attention(*torch.randn(3, 1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    name = "favor"
    cross_attention_advice = "use near=0 for cross-attention"
    features: DrawnFeatures | HedgehogFeatures | ExponentialFeatures

    def __init__(
        self,
        head_dim: int,
        num_features: int = 256,
        *,
        near: int = 64,
        reach: int = 1,
        sinks: int = 4,
        far: bool = True,
        estimator: str = "positive",
        coupling: str = "orthogonal",
        kernel: str = "softmax",
        scale: float | None = None,
        num_heads: int | None = None,
        transform: bool = False,
        seed: int = 0,
        backend: str = "auto",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.options = make_options(near, sinks, kernel, scale, backend, chunk, head_dim=head_dim, reach=reach, far=far)
        check_coupling(self.name, coupling, head_dim)
        self.coupling = coupling
        self.seed = checks.seed(self.name, seed)
        self.set_features(estimator, num_features, num_heads, transform=transform)
        if estimator in FITTED and self.features.weight.device.type != "meta":  # a model being loaded has its own
            warnings.warn(checks.not_calibrated(estimator), UncalibratedWarning, stacklevel=2)

    def set_features(
        self, estimator: str, num_features: int, num_heads: int | None, *, transform: bool = False
    ) -> None:
        """Features of another kind or number, as the constructor makes them. Loses the present ones."""
        checks.choice(self.name, "estimator", estimator := current_name(estimator), ESTIMATORS)
        checks.optional_count(self.name, "num_heads", num_heads)
        if estimator == "trigonometric" and (self.options.near or self.options.sinks):
            raise checks.not_with_trigonometric(self.options.near, self.options.sinks)
        if transform and (estimator != "calibrated" or self.options.gaussian):
            raise checks.no_transform(estimator, self.options.gaussian)
        checks.count(self.name, "num_features", num_features)
        common = {"coupling": self.coupling, "num_heads": num_heads, "scale": self.options.scale, "seed": self.seed}
        if estimator in LEARNED:
            offset = bool(self.options.near or self.options.sinks)
            features = learned_features(estimator, self.head_dim, num_features, offset=offset, **common)
        else:
            features = DrawnFeatures(self.head_dim, num_features, estimator=estimator, transform=transform, **common)
        self.features, self.estimator, self.transform = features, estimator, transform
        self.num_features, self.num_heads = num_features, num_heads

    def adopt_features(self, other: "FavorAttention") -> None:
        """Takes the features of another layer of the same head_dim, kernel, near blocks and sinks."""
        self.features, self.estimator, self.transform = other.features, other.estimator, other.transform
        self.num_features, self.num_heads = other.num_features, other.num_heads

    @property
    def weight(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Drawn rows `[heads or 1, M, D]`; None if features are learned."""
        return self.features.weight if isinstance(self.features, DrawnFeatures) else None

    @property
    def trigonometric(self) -> bool:
        return self.estimator == "trigonometric"

    @property
    def positional(self) -> bool:
        return self.options.near > 0

    @property
    def convex(self) -> bool:
        return not self.trigonometric

    @property
    def feature_map(self) -> FeatureMap:
        return self.features.feature_map

    @property
    def chunk(self) -> int | None:
        """Tokens done at once, None to choose; speed only."""
        return self.options.chunk or None

    @chunk.setter
    def chunk(self, value: int | None) -> None:
        self.options = self.options._replace(chunk=checks.optional_count(self.name, "chunk", value) or 0)

    @property
    def far(self) -> bool:
        """Whether there is a far field. Without it, outputs show what it is worth; states are others, too."""
        return self.options.far

    @far.setter
    def far(self, value: bool) -> None:
        self.options = self.options._replace(far=favor_checks.far(value, self.options.near, self.options.sinks))

    def extra_repr(self) -> str:
        o = self.options
        kernel = "gaussian" if o.gaussian else "softmax"
        return (
            f"head_dim={self.head_dim}, num_features={self.num_features}, near={o.near}, "
            + (f"reach={o.reach}, " if o.reach > 1 else "")
            + f"sinks={o.sinks}, "
            + ("" if o.far else "far=False, ")
            + f"estimator={self.estimator!r}, coupling={self.coupling!r}, kernel={kernel!r}, scale={o.scale:.4g}, "
            + f"num_heads={self.num_heads}"
            + (", transform=True" if self.transform else "")
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def redraw(self, seed: int) -> None:
        """Fresh random features, in place; the same seed gives the same ones on every machine and rank.

        What `calibrate` found stays. States made before belong to the old features: start decoding again.
        """
        if not isinstance(self.features, DrawnFeatures):
            raise checks.learned_features_stay(self.estimator)
        self.features.redraw(seed)

    def reset_parameters(self) -> None:
        """The features of the constructor's seed, for modules materialised from the meta device."""
        self.features.reset_parameters()

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        features = self.features
        checks.map_rows(self.name, features.weight if isinstance(features, DrawnFeatures) else features.query, q, k)

    def _turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All of them in the precision of the features and with as many heads, q and k after the transform."""
        if not self.transform:
            return q, k, v
        k, v = map_heads(self.feature_map, q, k, v)
        dtype = torch.promote_types(q.dtype, torch.float32)
        return *self._turn(q.to(dtype), k.to(dtype)), v.to(dtype)

    def _turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.features, DrawnFeatures)
        q_turn, k_turn = self.features.query_transform, self.features.key_transform
        if q_turn is None or k_turn is None:
            return q, k
        return q @ _for_heads(q_turn, q).mT, k @ _for_heads(k_turn, k).mT

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        if self.trigonometric:
            k, v = map_heads(self.feature_map, q, k, v)
            return self._trigonometric(q, k, v, key_mask, None, causal)[0]
        dtype = v.dtype
        return attend(self.options, *self._turned(q, k, v), self.feature_map, causal, key_mask).to(dtype)

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, FavorState]:
        options = self.options
        if key_mask is None and not self.transform and not self.trigonometric:
            features = cast(LayerFeatures, self._modules["features"])  # attributes of modules are slow
            done = favor_state.plain_step(options, q, k, v, features, state)
            if done is not None:
                return done
        self.check_extend(q, k, v, key_mask)
        dtype = v.dtype
        feature_map = self.features.feature_map_for(dtype)
        q, k, v = self._turned(q, k, v)
        k, v = map_heads(feature_map, q, k, v)
        fields = favor_state.fields(options, k, v, *self._state_sizes())
        past = states.state(self.name, state, FavorState, fields, k)
        if self.trigonometric:
            out, far_max, far_sum = self._trigonometric(q, k, v, key_mask, past, True)
            new = q.shape[2] if key_mask is None else key_mask.sum(-1)
            return out, past.with_far(far_max, far_sum)._replace(length=past.length + new)
        out, new_state = favor_state.extend(options, q, k, v, feature_map, past, key_mask)
        return out if out.dtype is dtype else out.to(dtype), new_state

    def _state_sizes(self) -> tuple[int, int]:
        """Running maxima and features per head of the far field."""
        features = self.num_features if self.options.far else 0
        return (1, 2 * features) if self.trigonometric else (features, features)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        q, k = self._turn(q, k) if self.transform else (q, k)
        x, y = (t * self.options.scale**0.5 for t in (q, k))
        if self.trigonometric:
            log_weight = self._trigonometric_log_weight(y)
            top = log_weight.amax(-1, keepdim=True).detach()
            weight = _for_heads(self.feature_map.query, q)
            estimate = trigonometric_features(x, weight) @ trigonometric_features(y, weight).mT
            return normalised(estimate * (log_weight - top).exp()[:, :, None] * seen)
        exact, logits = self.exact_pairs(q_index, k_index), x @ y.mT
        if not self.options.far:
            seen = seen & exact
        else:
            logits = torch.where(exact, logits, log_estimate(x, y, self.feature_map))
        if self.options.gaussian:
            logits = logits - (y.square().sum(-1) / 2)[:, :, None]
        return masked_softmax(logits, seen)

    def exact_pairs(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """`[B or 1, 1, R, S]`: pairs whose weight is exact."""
        exact = (k_index < self.options.sinks)[:, None].expand(-1, q_index.shape[1], -1)
        if self.options.near:
            q_block, k_block = q_index // self.options.near, k_index // self.options.near
            exact = exact | ((q_block[:, :, None] - k_block[:, None]).abs() <= self.options.reach)
        return exact[:, None]

    def _trigonometric_log_weight(self, y: Tensor) -> Tensor:
        """The Gaussian kernel's weight exp(-|y|^2 / 2) takes away what the softmax kernel's brings."""
        return torch.zeros_like(y[..., 0]) if self.options.gaussian else trigonometric_log_weight(y)

    def _trigonometric(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: FavorState | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Signed features go through the linear engine: no logarithms, one running maximum per head."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        x, y = (t.to(dtype) * self.options.scale**0.5 for t in (q, k))
        weight = self.feature_map.query.to(dtype)
        groups = q.shape[1] // k.shape[1] if weight.shape[0] > 1 else 1
        phi_q = trigonometric_features(x, weight.repeat_interleave(groups, 0))
        phi_k = trigonometric_features(y, weight)
        far = {} if state is None else {"far_max": state.far_max, "far_sum": state.far_sum}
        others = {"log_weight": self._trigonometric_log_weight(y), "alive": key_mask, **far}
        options = LinearOptions("identity", root=1.0, chunk=self.options.chunk, backend=self.options.backend)
        out, far_max, far_sum = linear_attention(phi_q, phi_k, v.to(dtype), options, causal=causal, **others)
        return out.to(q.dtype), far_max, far_sum


def log_estimate(x: Tensor, y: Tensor, map: FeatureMap) -> Tensor:
    """log of sum_r phi_r(x) psi_r(y), which estimates exp(x.y). x `[B, H, T, D]`, y `[B, H, S, D]`."""
    return log_sum_of_products(*log_features(x, y, map))


def log_features(x: Tensor, y: Tensor, map: FeatureMap) -> tuple[Tensor, Tensor]:
    """log phi_r(x) `[B, H, T, M]` and log psi_r(y) `[B, H, S, M]`, their bias included."""
    query, key, bias = (_for_heads(t, x) for t in (map.query, map.key, map.key_bias))
    log_phi, log_psi = x @ query.mT, y @ key.mT
    if map.rule == "groups":
        log_phi, log_psi = (t.unflatten(-1, (map.groups, -1)).log_softmax(-1).flatten(-2) for t in (log_phi, log_psi))
    if map.rule == "norm":
        log_phi = log_phi - x.square().sum(-1, keepdim=True) / 2
        log_psi = log_psi - y.square().sum(-1, keepdim=True) / 2
    if map.offset_weight is not None and map.offset_bias is not None:
        offset_weight, offset_bias = _for_heads(map.offset_weight, x), _for_heads(map.offset_bias, x)
        log_phi = log_phi + x @ offset_weight[..., None] + offset_bias[:, None, None]
    return log_phi, log_psi + bias[:, None]


def _for_heads(tensor: Tensor, like: Tensor) -> Tensor:
    """`[1 or K, ...]` for each of the heads of `like`, in its dtype."""
    tensor = tensor.to(like.dtype)
    return tensor.repeat_interleave(like.shape[1] // tensor.shape[0], 0)
