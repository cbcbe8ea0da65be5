"""Functions are what the modules of the same name compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import (
    ClusterAttention,
    FavorAttention,
    LinearAttention,
    LshAttention,
    Mechanism,
    PagesAttention,
    SoftmaxAttention,
    StridedAttention,
    WindowAttention,
    errors,
    functional,
)

Function = Callable[..., Tensor]
D = 4


def tensors_of(mechanism: Any) -> tuple[Any, ...]:
    """What the function takes beside q, k and v, where the module has drawn it."""
    if isinstance(mechanism, FavorAttention):
        return (mechanism.feature_map,)
    if isinstance(mechanism, LshAttention):
        return (mechanism.weight,)
    return (mechanism.centroids,) if isinstance(mechanism, ClusterAttention) else ()


ALIKE: dict[str, tuple[Function, Callable[..., Mechanism], dict[str, Any]]] = {
    "softmax": (functional.softmax_attention, SoftmaxAttention, {}),
    "softmax, scale": (functional.softmax_attention, SoftmaxAttention, {"scale": 0.3}),
    "linear": (functional.linear_attention, LinearAttention, {}),
    "linear, softplus": (functional.linear_attention, LinearAttention, {"feature_map": "softplus"}),
    "favor": (functional.favor_attention, FavorAttention, {"near": 8, "sinks": 2}),
    "favor, defaults": (functional.favor_attention, FavorAttention, {}),
    "favor, gaussian": (functional.favor_attention, FavorAttention, {"near": 0, "kernel": "gaussian", "scale": 0.4}),
    "window": (functional.window_attention, WindowAttention, {"window": 6}),
    "window, dilated": (functional.window_attention, WindowAttention, {"window": 4, "dilation": [1, 3], "scale": 0.9}),
    "strided": (functional.strided_attention, StridedAttention, {"stride": 7}),
    "strided, fixed": (functional.strided_attention, StridedAttention, {"stride": 8, "pattern": "fixed", "summary": 3}),
    "pages": (functional.pages_attention, PagesAttention, {"pages": 2, "page": 4, "window": 8}),
    "pages, defaults": (functional.pages_attention, PagesAttention, {}),
    "lsh": (functional.lsh_attention, LshAttention, {"bucket_size": 8}),
    "cluster": (functional.cluster_attention, ClusterAttention, {"bucket_size": 8}),
}
DRAWN = {"favor": {"num_features": 16}, "lsh": {"num_buckets": 8, "rounds": 2}, "cluster": {"num_clusters": 4}}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", ALIKE)
def test_a_function_is_its_module(name: str, causal: bool, padded: bool) -> None:
    function, make, options = ALIKE[name]
    drawn = DRAWN.get(name.partition(",")[0], {}) | ({"num_heads": 2} if make is ClusterAttention else {})
    torch.manual_seed(0)
    mechanism = make(D, **options, **drawn)
    q, k, v = torch.randn(2, 4, 300, D), *torch.randn(2, 2, 2, 300, D)
    mask = torch.arange(300) < torch.tensor([[300], [170]]) if padded else None
    if not causal and not mechanism.supports_bidirectional:
        for call in (mechanism, function):
            with pytest.raises(errors.ConfigError, match=f"^{mechanism.name}: can only be causal"):
                call(q, k, v, key_mask=mask)
        return
    want = mechanism(q, k, v, causal=causal, key_mask=mask)
    assert torch.equal(function(q, k, v, *tensors_of(mechanism), causal=causal, key_mask=mask, **options), want)
