"""Trigonometric features of exp(x.y): unbiased but signed, so denominators can vanish. Here to be compared with."""

import torch
from torch import Tensor


def trigonometric_features(x: Tensor, weight: Tensor) -> Tensor:
    """`[cos(Wx), sin(Wx)]`; products sum to `sum_r cos(w_r.(x - y))`. x `[B, H, T, D]`, weight `[H or 1, M, D]`."""
    phase = x @ weight.mT
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def trigonometric_log_weight(y: Tensor) -> Tensor:
    """`|y|^2 / 2` per key: exp(x.y) = exp(|x|^2/2) exp(|y|^2/2) E cos(w.(x - y)). `[B, H, S]`."""
    return y.square().sum(-1) / 2
