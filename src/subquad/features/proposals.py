"""Where the rows of positive features are drawn from: any Gaussian will do, some give far less variance.

For rows w ~ N(b, Sigma), x = sqrt(scale) q, y = sqrt(scale) k and z = x + y,

    exp(x.y) = E[ rho(w) exp(w.x - |x|^2 / 2) exp(w.y - |y|^2 / 2) ],   rho(w) = N(w; 0, I) / N(w; b, Sigma),

whatever b and Sigma are: a bad choice costs variance, never truth. One row has the relative variance

    prod_l s_l^2 / sqrt(t_l) exp((z_l - b_l)^2 / t_l) - 1,   s_l^2 the eigenvalues of Sigma, t_l = 2 s_l^2 - 1,

and the mean of its logarithm over pairs is least for `widening` of the second moments of z - b.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Proposal(NamedTuple):
    """N(mean, root @ root.T) for each head: mean `[heads, D]`, root `[heads, D, D]` with a positive determinant."""

    mean: Tensor
    root: Tensor


def widening(moment: Tensor) -> Tensor:
    """The t = 2 s^2 - 1 that minimises ln((1 + t) / 2) - ln(t) / 2 + moment / t, with moment = E (z - b)^2."""
    a = 1 + 2 * moment
    return (a + (a * a + 8 * moment).sqrt()) / 2


def isotropic(moment: Tensor, dim: int) -> Proposal:
    """The best round one around the origin, for E |z|^2 / dim = `moment` `[heads]`: FAVOR++, `optimal`."""
    size = ((1 + widening(moment.double())) / 2).sqrt()
    eye = torch.eye(dim, dtype=torch.float64, device=moment.device)
    return Proposal(size.new_zeros(len(size), dim), size[:, None, None] * eye)


def shaped(mean: Tensor, moment: Tensor) -> Proposal:
    """The best one around `mean` `[heads, D]` for the second moments `[heads, D, D]` of z - mean.

    FAVOR#, `sharp`, with mean 0 and all pairs alike; `calibrated` with pairs weighted by their attention.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    sizes = ((1 + widening(values.clamp(min=0))) / 2).sqrt()
    return Proposal(mean.double(), (vectors * sizes[:, None]) @ vectors.mT)


def prior(heads: int, dim: int, scale: float) -> Proposal:
    """For want of data: q and k are taken to be N(0, I), so every z_l^2 is 2 * scale on average."""
    return isotropic(torch.full((heads,), 2 * scale, dtype=torch.float64, device="cpu"), dim)


def log_density_ratio(rows: Tensor, noise: Tensor, root: Tensor) -> Tensor:
    """log rho of rows = mean + noise @ root.T, `[heads, M]`."""
    return (noise.square().sum(-1) - rows.square().sum(-1)) / 2 + torch.linalg.slogdet(root).logabsdet[:, None]
