"""The C++ engine against the whole contract, and against the torch engine where the contract does not reach."""

from typing import Any

import torch
from torch import Tensor

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.testing import Check, parametrize_contract

D = 6


def to_single(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.float() if t.dtype == torch.float64 else t for t in tensors]


class InSingle:
    """Computes in float32, by the C++ engine, what comes in float64."""

    rounding = 1e-5

    def forward(self: Any, *qkv: Tensor, **options: Any) -> Tensor:
        return super().forward(*to_single(qkv), **options).to(qkv[0].dtype)  # pyright: ignore

    def extend(self: Any, q: Tensor, k: Tensor, v: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        out, state = super().extend(*to_single((q, k, v)), state, **options)  # pyright: ignore
        return out.to(q.dtype), state


class NativeFavor(InSingle, FavorAttention):
    pass


class NativeLinear(InSingle, LinearAttention):
    pass


class PerQueryHead(NativeFavor):
    key_heads = 2


@parametrize_contract(
    {
        "linear": lambda: NativeLinear(D, backend="cpu"),
        "linear-relu-projected": lambda: NativeLinear(
            D, feature_map="relu", num_features=12, num_heads=2, backend="cpu"
        ),
        "linear-softplus": lambda: NativeLinear(D, feature_map="softplus", backend="cpu"),
        "linear-relu2": lambda: NativeLinear(D, feature_map="relu2", num_features=9, coupling="iid", backend="cpu"),
        "linear-exp": lambda: NativeLinear(D, feature_map="exp", backend="cpu"),
        "favor": lambda: NativeFavor(D, 16, near=8, sinks=2, backend="cpu"),
        "favor-paper": lambda: NativeFavor(D, 16, near=0, sinks=0, backend="cpu"),
        "favor-sinks": lambda: NativeFavor(D, 16, near=0, sinks=3, num_heads=2, backend="cpu"),
        "favor-near": lambda: NativeFavor(D, 16, near=5, sinks=0, estimator="hyperbolic", backend="cpu"),
        "favor-more-sinks-than-near": lambda: NativeFavor(D, 16, near=4, sinks=9, num_heads=3, backend="cpu"),
        "favor-all-near": lambda: NativeFavor(D, 16, near=200, sinks=1, backend="cpu"),
        "favor-gaussian": lambda: NativeFavor(D, 16, near=8, sinks=2, kernel="gaussian", backend="cpu"),
        "favor-gaussian-paper": lambda: NativeFavor(
            D, 16, near=0, sinks=0, kernel="gaussian", scale=0.5, backend="cpu"
        ),
        "favor-per-query-head": lambda: PerQueryHead(D, 16, near=8, sinks=2, num_heads=4, backend="cpu"),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)
