"""The attention matrices of a model on one sequence: ours through `attention_matrix`, Hugging Face's as they come."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from subquad.checks import diagnostics as checks
from subquad.mechanism import Mechanism
from subquad.recording.calls import Call, Layer
from subquad.recording.hugging_face import implementation
from subquad.recording.layers import own_layers
from subquad.recording.stream import stream


@torch.no_grad()
def attention_matrices(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Matrices `[H, n, n]` of each layer, in the order of the layers; inputs `[1, n]` without padding."""
    if own_layers(model, Mechanism):
        return _of_mechanisms(model, inputs)
    checks.shows_attention(model)
    with implementation(model, "eager"):  # the only one that makes the matrices at all
        out = model(**inputs, output_attentions=True, return_dict=True)
    return [weights[0] for weights in checks.given_matrices(getattr(out, "attentions", None), model)]


def _of_mechanisms(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """By the dense formula, for what each mechanism is given."""
    matrices: list[Tensor] = []

    def observe(layer: Layer, call: Call) -> None:
        mechanism = cast(Mechanism, layer.mechanism)
        matrix = mechanism.attention_matrix(call.q, call.k, causal=call.causal, key_mask=call.key_mask, **call.options)
        matrices.append(matrix[0])

    stream(model, [inputs], observe, op="spectrum", exact=False, kinds=Mechanism)
    return matrices


def shuffled_rows(matrix: Tensor, seed: int) -> Tensor:
    """`[H, n, m]` with the weights of each row in random places among those it had: as sharp, without structure."""
    chance = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(seed)).to(matrix.device)
    seen = matrix != 0
    some_order = torch.where(seen, chance, 2.0).argsort(-1)  # places that are seen, shuffled; then the others
    their_order = torch.sort((~seen).long(), dim=-1, stable=True).indices
    return torch.zeros_like(matrix).scatter(-1, their_order, matrix.gather(-1, some_order))
