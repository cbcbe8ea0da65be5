"""Muon (Jordan et al. 2024) for the matrices of a model, AdamW for the rest, in one optimiser.

torch.optim.Muon takes matrices only, and orthogonalises in bfloat16, which CPUs do slowly; here it is float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, chosen by Muon's authors for a steep start
ITERATIONS = 5


class MuonAdamW(Optimizer):
    """Matrices inside the model move along orthogonalised momentum, everything else by AdamW.

    Args:
        lr: of Muon; a step has a root-mean-square of `lr * 0.2`, as AdamW's have, so one rate suits both.
    """

    def __init__(self, model: nn.Module, lr: float, *, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        matrices, vectors = split_parameters(model)
        groups = [
            {"params": matrices, "muon": True, "weight_decay": weight_decay},
            {"params": vectors, "muon": False, "weight_decay": 0.0},
        ]
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "betas": (0.9, 0.95), "eps": 1e-8}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, update in zip(moved, self._updates(group, moved), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])
        return loss

    def _updates(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        return self._muon(group, parameters) if group["muon"] else [self._adam(group, p) for p in parameters]

    def _muon(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        directions = []
        for parameter in parameters:
            state, gradient = self.state[parameter], _gradient(parameter)
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - group["momentum"])
            directions.append(gradient.lerp(momentum, group["momentum"]))  # Nesterov
        return orthogonalised(directions)

    def _adam(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        state, gradient = self.state[parameter], _gradient(parameter)
        state["step"] = state.get("step", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(gradient))
        square = state.setdefault("square", torch.zeros_like(gradient))
        first, second = group["betas"]
        mean.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        size = (square / (1 - second ** state["step"])).sqrt() + group["eps"]
        return mean / (1 - first ** state["step"]) / size


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of linear layers inside the model; embeddings, output head, norms and biases."""
    outer = (nn.Embedding,)
    tables = {id(p) for module in model.modules() if isinstance(module, outer) for p in module.parameters()}
    heads = {id(p) for name, p in model.named_parameters() if name.startswith(("lm_head", "score"))}
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            inside = parameter.dim() == 2 and id(parameter) not in tables | heads
            (matrices if inside else vectors).append(parameter)
    return matrices, vectors


def orthogonalised(matrices: Iterable[Tensor]) -> list[Tensor]:
    """Each matrix with its singular values near 1, scaled to the root-mean-square of an AdamW step; equal shapes go
    through the iteration together."""
    matrices = list(matrices)
    out: list[Tensor] = [torch.empty(0)] * len(matrices)
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        places = [i for i, matrix in enumerate(matrices) if matrix.shape == shape]
        x = torch.stack([matrices[i] for i in places])
        wide = x if shape[0] <= shape[1] else x.mT
        wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)
        a, b, c = COEFFICIENTS
        for _ in range(ITERATIONS):
            gram = wide @ wide.mT
            wide = a * wide + (b * gram + c * gram @ gram) @ wide
        x = (wide if shape[0] <= shape[1] else wide.mT) * (0.2 * max(shape) ** 0.5)
        for place, matrix in zip(places, x, strict=True):
            out[place] = matrix
    return out
