"""What linear attention takes.

Letters as in `blocks.py`.
"""

from typing import NamedTuple

from torch import Tensor


class LinearOptions(NamedTuple):
    """Whatever is not a tensor, the same record from the mechanism to the engines.

    feature_map: a name of `features.elementwise`. root: queries and keys are multiplied by it. chunk: tokens done at
    once, 0 to choose; speed only. backend: an engine, or "auto" until one is chosen. The rest is settled for each call:
    borders says whether to keep what the backward needs.
    """

    feature_map: str
    root: float
    chunk: int
    backend: str
    causal: bool = False
    borders: bool = False


class LinearInputs(NamedTuple):
    """q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]`.

    weight `[K or 1, M, D]` projects queries and keys first (None: M = D). log_weight `[B, K, S]` of keys. alive
    `[B or 1, S]` bool: keys that count (None: all). far_max `[B, K, 1]`, far_sum `[B, K, M, V]`: the state before
    the first token (None: empty).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None = None
    log_weight: Tensor | None = None
    alive: Tensor | None = None
    far_max: Tensor | None = None
    far_sum: Tensor | None = None

    @property
    def num_features(self) -> int:
        return self.k.shape[-1] if self.weight is None else self.weight.shape[1]
