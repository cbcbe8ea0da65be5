"""The attention matrices of a model on one sequence: ours through `attention_matrix`, Hugging Face's as they come."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subquad.checks import diagnostics as checks
from subquad.mechanism import Mechanism


@torch.no_grad()
def attention_matrices(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Matrices `[H, n, n]` of each layer, in the order of the layers; inputs `[1, n]` without padding."""
    if any(isinstance(module, Mechanism) for module in model.modules()):
        return _of_mechanisms(model, inputs)
    checks.shows_attention(model)
    with _eager(model):
        out = model(**inputs, output_attentions=True, return_dict=True)
    return [weights[0] for weights in checks.given_matrices(getattr(out, "attentions", None), model)]


def _of_mechanisms(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Listens to what each mechanism is asked."""
    matrices: list[Tensor] = []

    def listen(mechanism: Any, given: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        matrices.append(mechanism.attention_matrix(*given[:2], **options)[0])

    hooks = [
        module.register_forward_pre_hook(listen, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, Mechanism)
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return matrices


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Only this implementation of attention makes the matrices at all."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def shuffled_rows(matrix: Tensor, seed: int) -> Tensor:
    """`[H, n, m]` with the weights of each row in random places among those it had: as sharp, without structure."""
    chance = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(seed)).to(matrix.device)
    seen = matrix != 0
    some_order = torch.where(seen, chance, 2.0).argsort(-1)  # places that are seen, shuffled; then the others
    their_order = torch.sort((~seen).long(), dim=-1, stable=True).indices
    return torch.zeros_like(matrix).scatter(-1, their_order, matrix.gather(-1, some_order))
