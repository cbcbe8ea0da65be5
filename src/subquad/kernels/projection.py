"""Rows of a matrix times tokens, and the gradients of that.

x `[B, K, ..., D]`, weight `[K or 1, M, D]`. Letters as in `blocks.py`.
"""

from torch import Tensor


def project(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, head by head where the weight has heads."""
    if weight.shape[0] == 1:
        return x @ weight[0].mT
    return (x.flatten(2, -2) @ weight.mT).unflatten(2, x.shape[2:-1])


def unproject(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of `project(x, weight)` for x."""
    if weight.shape[0] == 1:
        return grad @ weight[0]
    return (grad.flatten(2, -2) @ weight).unflatten(2, grad.shape[2:-1])


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient of `project(x, weight)` for the weight."""
    if weight.shape[0] == 1:
        return (grad.flatten(0, -2).mT @ x.flatten(0, -2))[None]
    return (grad.flatten(2, -2).mT @ x.flatten(2, -2)).sum(0)
