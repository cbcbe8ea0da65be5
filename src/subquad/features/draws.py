"""Gaussian projection rows: every row is N(0, I) on its own, `coupling` says how rows depend on each other."""

import hashlib

import torch
from torch import Tensor

COUPLINGS = ("iid", "orthogonal")


def _normal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """On the CPU, whatever the default device: draws must not depend on the machine."""
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")


def haar(dim: int, generator: torch.Generator) -> Tensor:
    """A `[dim, dim]` rotation or reflection, uniform over the orthogonal group, float64."""
    q, r = torch.linalg.qr(_normal(dim, dim, generator))
    # QR fixes the signs of R by its algorithm, not at random; without this factor Q is not uniform
    # and the features are biased along (1, ..., 1).
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def gaussian_rows(rows: int, dim: int, coupling: str, generator: torch.Generator) -> Tensor:
    """`[rows, dim]` float64. "orthogonal": rows in each block of `dim` are orthogonal, with chi-distributed norms."""
    if coupling == "iid":
        return _normal(rows, dim, generator)
    blocks = [haar(dim, generator) for _ in range(-(-rows // dim))]
    norms = _normal(rows, dim, generator).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:rows] * norms


def derived_seed(*parts: int) -> int:
    """A seed below 2**32 for each combination of whole numbers, the same everywhere."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
