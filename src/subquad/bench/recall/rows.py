"""What is compared: controls, every causal mechanism, and references from elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from subquad.bench.recall.references import REFERENCES, ReferenceAttention
from subquad.bench.recall.tasks import Task
from subquad.mechanism import state_bytes
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.nn import SelfAttention

EXACT, NOTHING, WINDOW, NARROW = "softmax", "identity", "window", "near-only"  # the controls


@dataclass(frozen=True)
class Shape:
    """Of the model: the same for every row. features, near, sinks: of the rows that have them."""

    layers: int = 2
    hidden: int = 128
    heads: int = 2
    short_conv: int = 4
    qk_norm: bool = False
    positions: str = "rotary"
    rotary_share: float = 1.0
    features: int = 128
    near: int = 16
    sinks: int = 4

    @property
    def favor(self) -> dict[str, int]:
        """Options of `favor`."""
        return {"num_features": self.features, "near": self.near, "sinks": self.sinks}


@dataclass(frozen=True)
class Row:
    """A line of the table: a mechanism with options, or one of `REFERENCES`."""

    name: str
    attention: str
    options: Callable[[Shape], dict[str, Any]] = lambda _: {}

    def model(self, task: Task, shape: Shape, seed: int) -> SubquadForCausalLM:
        torch.manual_seed(seed)
        reference = REFERENCES.get(self.attention)
        config = SubquadConfig(
            vocab_size=task.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=2 * shape.hidden,
            initializer_range=0.05,
            short_conv=shape.short_conv,
            qk_norm=shape.qk_norm,
            positions=shape.positions,
            rotary_share=shape.rotary_share,
            attention=self.attention if reference is None else NOTHING,
            attention_options=self.options(shape),
        )
        model = SubquadForCausalLM(config)
        model.redraw(seed)
        if reference is not None:
            for block in model.model.blocks:
                nn.Module.__setattr__(block, "attention", _initialised(reference, shape, config.initializer_range))
        return model


def _initialised(kind: type[ReferenceAttention], shape: Shape, size: float) -> ReferenceAttention:
    layer = kind(shape.hidden, shape.heads, shape.short_conv)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gate):
        nn.init.normal_(linear.weight, std=size)
    return layer


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(NOTHING, "identity"),
        Row(NARROW, "favor", lambda shape: {**shape.favor, "far": False}),
        Row(WINDOW, "window", lambda shape: {"window": window_of_equal_memory(shape)}),
        Row("linear", "linear"),
        Row("linear-relu", "linear", lambda shape: {"feature_map": "relu", "num_features": shape.features}),
        Row("favor", "favor", lambda shape: shape.favor),
        Row("favor-paper", "favor", lambda shape: {**shape.favor, "near": 0, "sinks": 0}),
        Row("hedgehog", "favor", lambda shape: {**shape.favor, "estimator": "hedgehog"}),
        Row("lsh", "lsh", lambda _: {"num_buckets": 16, "bucket_size": 32, "rounds": 4}),
        Row("cluster", "cluster", lambda _: {"num_clusters": 16, "bucket_size": 32}),
        Row("strided", "strided", lambda _: {"stride": 32}),
        Row("pages", "pages", lambda _: {"pages": 8, "page": 8, "window": 32}),
        Row("gla", "gla"),
        Row("deltanet", "deltanet"),
        Row(EXACT, "softmax"),
    )
}


@torch.no_grad()
def state_size(layer: SelfAttention | ReferenceAttention, tokens: int) -> int:
    """Bytes that a layer keeps of one sequence of so many tokens, short convolutions left out."""
    if isinstance(layer, ReferenceAttention):
        return 4 * layer.state_numbers
    heads = layer.q_proj.out_features // layer.head_dim
    q = torch.randn(1, heads, tokens, layer.head_dim)
    return state_bytes(layer.mechanism.extend(q, q, q)[1])


def window_of_equal_memory(shape: Shape) -> int:
    """Tokens whose keys and values take the memory of the row `favor`; even, as windows are."""
    dim = shape.hidden // shape.heads
    layer = SelfAttention(shape.hidden, shape.heads, attention="favor", options=shape.favor)
    return state_size(layer, 1) // (2 * 4 * shape.heads * dim) // 2 * 2
