"""Models small enough for float64."""

from typing import Any

import torch
from torch import Tensor

from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.nn import ShortConvolution

SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def favor_and_softmax(key_heads: int) -> dict[str, Any]:
    """Options of `mixed`: features on every other key head."""
    favor = {"attention": "favor", "heads": [*range(0, key_heads, 2)], "num_features": 8, "near": 4, "sinks": 1}
    return {"parts": [favor, {"attention": "softmax", "heads": [*range(1, key_heads, 2)]}]}


# Defaults are made for thousands of tokens: on the few of a test, windows and strides see everything, buckets nothing.
NARROW: dict[str, dict[str, Any]] = {
    "favor": {"num_features": 8, "near": 4, "sinks": 1},
    "linformer": {"rank": 4, "max_length": 64},
    "window": {"window": 4, "global_tokens": 1},
    "lsh": {"num_buckets": 4, "bucket_size": 2, "rounds": 2},
    "cluster": {"num_clusters": 3, "bucket_size": 2},
    "strided": {"stride": 3},
    "mixed": favor_and_softmax(SMALL["num_key_value_heads"]),
    "pages": {"pages": 1, "page": 2, "window": 2, "sinks": 1},
}
NEEDED = {"mixed": NARROW["mixed"]}  # options without which there is no mechanism

# Of `subquad train`.
TINY_RUN = (
    "--window",
    "64",
    "--layers",
    "1",
    "--hidden",
    "16",
    "--heads",
    "2",
    "--eval-samples",
    "2",
    "--threads",
    "1",
)


def make(
    kind: Any = SubquadForCausalLM, dtype: torch.dtype = torch.float64, *, stir: bool = False, **options: Any
) -> Any:
    """stir: convolutions that are not the identity, which new ones are."""
    torch.manual_seed(0)
    model = kind(SubquadConfig(**{**SMALL, "num_hidden_layers": 2, **options})).to(dtype).eval()
    for module in model.modules():
        if stir and isinstance(module, ShortConvolution):
            module.weight.data += 0.05 * torch.randn_like(module.weight)
    return model


def random_ids(*shape: int) -> Tensor:
    return torch.randint(2, 23, shape, generator=torch.Generator().manual_seed(5))
