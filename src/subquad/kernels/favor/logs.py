"""Log-features of one tile, and their vector-Jacobian product.

Shapes: x `[B, K, ..., D]`, weight `[K or 1, M, D]`, logs `[B, K, ..., M]`, per-token scalars `[B, K, ...]`.
Letters as in `blocks.py`.
"""

import torch
from torch import Tensor

from subquad.features import FeatureMap
from subquad.kernels.favor.inputs import MAP_TENSORS
from subquad.kernels.problem import Gradients
from subquad.kernels.projection import project, unproject, weight_gradient


def sum_to_heads(grad: Tensor, heads: int) -> Tensor:
    """Sums `[B, K, ..., M]` to `[heads or 1, M]`."""
    summed = grad.flatten(2, -2).sum((0, 2))
    return summed if heads > 1 else summed.sum(0, keepdim=True)


class LogFeatures:
    """The feature map of one problem, in the compute dtype, with gradients accumulated over tiles when asked."""

    def __init__(self, map: FeatureMap, dtype: torch.dtype, gaussian: bool, want_gradients: bool = False) -> None:
        self.query, self.key, self.key_bias = (t.to(dtype) for t in (map.query, map.key, map.key_bias))
        empty = self.query.new_zeros(0)
        self.offset_weight = empty if map.offset_weight is None else map.offset_weight.to(dtype)
        self.offset_bias = empty if map.offset_bias is None else map.offset_bias.to(dtype)
        self.rule, self.groups = map.rule, map.groups
        # log-weight of a key = -norms * |y|^2 / 2: once for random features, once for the Gaussian kernel.
        self.query_norms = float(self.rule == "norm")
        self.key_norms = self.query_norms + gaussian
        self.gradients: Gradients | None = None
        if want_gradients:
            self.gradients = {name: torch.zeros_like(getattr(self, name)) for name in MAP_TENSORS}

    def of_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logs `[..., M]`, and a scalar per row that stays apart: within one row it is common to all features."""
        scalar = half_square(x).mul_(-self.query_norms)
        if self.offset_weight.numel():
            scalar += _affine(x, self.offset_weight, self.offset_bias)
        return self._grouped(project(x, self.query)), scalar

    def of_keys(self, y: Tensor, dead_bias: Tensor | None) -> Tensor:
        """Logs `[..., M]`; `dead_bias` is 0 for a key that counts, a huge negative number for one that does not."""
        logs = self._grouped(project(y, self.key))
        if self.rule == "groups":
            logs = logs.clone()  # autograd keeps what log_softmax returned
        logs += _per_head(self.key_bias, logs)
        if self.key_norms or dead_bias is not None:
            scalar = half_square(y).mul_(-self.key_norms)
            logs += (scalar if dead_bias is None else scalar + dead_bias)[..., None]
        return logs

    def queries_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient for x from that of the logs (consumed); the row scalar's is its sum over features."""
        row = grad.sum(-1)
        dx = unproject(self._grouped_backward(x, self.query, grad), self.query)
        dx.addcmul_(x, row[..., None], value=-self.query_norms)
        if self.offset_weight.numel():
            dx += row[..., None] * _per_head(self.offset_weight, x)
        if self.gradients is not None:
            self.gradients["query"].add_(weight_gradient(grad, x, self.query))
            if self.offset_weight.numel():
                self.gradients["offset_weight"].add_(sum_to_heads(row[..., None] * x, self.offset_weight.shape[0]))
                self.gradients["offset_bias"].add_(sum_to_heads(row[..., None], self.offset_bias.shape[0])[:, 0])
        return dx

    def keys_backward(self, y: Tensor, grad: Tensor) -> Tensor:
        row = grad.sum(-1)
        if self.gradients is not None:
            self.gradients["key_bias"].add_(sum_to_heads(grad, self.key_bias.shape[0]))
        dy = unproject(self._grouped_backward(y, self.key, grad), self.key)
        if self.gradients is not None:
            self.gradients["key"].add_(weight_gradient(grad, y, self.key))
        return dy.addcmul_(y, row[..., None], value=-self.key_norms)

    def _grouped(self, logs: Tensor) -> Tensor:
        if self.rule != "groups":
            return logs
        return logs.unflatten(-1, (self.groups, -1)).log_softmax(-1).flatten(-2)

    def _grouped_backward(self, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        if self.rule != "groups":
            return grad
        by_group = grad.unflatten(-1, (self.groups, -1))
        share = project(x, weight).unflatten(-1, (self.groups, -1)).softmax(-1)
        by_group.sub_(share * by_group.sum(-1, keepdim=True))
        return grad


def half_square(x: Tensor) -> Tensor:
    """|x|^2 / 2 over the last dim."""
    return x.square().sum(-1).div_(2)


def _per_head(tensor: Tensor, like: Tensor) -> Tensor:
    """`[K or 1, N]` made to broadcast against `[B, K, ..., N]`."""
    return tensor.view(tensor.shape[0], *[1] * (like.dim() - 3), tensor.shape[1])


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x * _per_head(weight, x)).sum(-1) + _per_head(bias[:, None], x)[..., 0]
