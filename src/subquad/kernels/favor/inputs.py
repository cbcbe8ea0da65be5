"""What FAVOR attention takes.

Letters as in `blocks.py`.
"""

from typing import NamedTuple

from torch import Tensor

from subquad.features import FeatureMap


class FavorOptions(NamedTuple):
    """Whatever is not a tensor, the same record from the mechanism to the engines.

    near: tokens per exact block, 0 for none. sinks: leading tokens that every query sees exactly. scale: of the
    logits. gaussian: exp(-|q - k|^2 / 2) instead of exp(q.k). chunk: tokens done at once, 0 to choose; speed only.
    backend: an engine, or "auto" until one is chosen. reach: near blocks on either side of the own one that are exact.
    far: whether there is a far field. The rest is settled for each call: rule and groups are the feature map's, borders
    says whether to keep what the backward needs.
    """

    near: int
    sinks: int
    scale: float
    gaussian: bool
    chunk: int
    backend: str
    causal: bool = False
    rule: str = "norm"
    groups: int = 1
    borders: bool = False
    reach: int = 1
    far: bool = True


class FavorInputs(NamedTuple):
    """q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]`, and the tensors of a `FeatureMap`.

    sink_k, sink_v `[B, K, sinks, ..]`: None if they are the first tokens of k and v.
    alive `[B or 1, S]` bool: keys that count, apart from the sinks. fold, like it: those of them that enter the far
    field (None: all). sink_seen `[B or 1, T]` int64: how many of the sinks each row sees (None: there are none).
    far_max `[B, K, M]`, far_sum `[B, K, M, V]`: the far field before the first token (None: empty).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query: Tensor
    key: Tensor
    key_bias: Tensor
    offset_weight: Tensor | None = None
    offset_bias: Tensor | None = None
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None
    alive: Tensor | None = None
    fold: Tensor | None = None
    sink_seen: Tensor | None = None
    far_max: Tensor | None = None
    far_sum: Tensor | None = None

    @property
    def num_features(self) -> int:
        return self.query.shape[-2]

    def feature_map(self, options: FavorOptions) -> FeatureMap:
        tensors = {name: getattr(self, name) for name in MAP_TENSORS}
        return FeatureMap(**tensors, rule=options.rule, groups=options.groups)


MAP_TENSORS = ("query", "key", "key_bias", "offset_weight", "offset_bias")
