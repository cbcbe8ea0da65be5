"""Gaussian projection rows: every row is N(0, I) on its own, `coupling` says how rows depend on each other."""

import hashlib

import torch
from torch import Tensor

from subquad import checks

COUPLINGS = ("iid", "orthogonal", "simplex", "hadamard")


def _normal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """On the CPU, whatever the default device: draws must not depend on the machine."""
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")


def haar(dim: int, generator: torch.Generator) -> Tensor:
    """A `[dim, dim]` rotation or reflection, uniform over the orthogonal group, float64."""
    q, r = torch.linalg.qr(_normal(dim, dim, generator))
    # QR fixes the signs of R by its algorithm, not at random; without this factor Q is not uniform
    # and the features are biased along (1, ..., 1).
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def simplex(dim: int, generator: torch.Generator) -> Tensor:
    """`[dim, dim]` unit rows to the corners of a regular simplex, turned at random: cosines are -1 / (dim - 1)."""
    rotation = haar(dim, generator)
    return (rotation - rotation.mean(0)) * (dim / (dim - 1)) ** 0.5


def hadamard(dim: int, generator: torch.Generator) -> Tensor:
    """`[dim, dim]` orthogonal: H D1 H D2 H D3 with random signs D, in O(dim^2 log dim) instead of O(dim^3).

    Close to uniform, but not quite: the one coupling whose rows are N(0, I) only nearly, from 32 dimensions on.
    """
    block = torch.eye(dim, dtype=torch.float64, device="cpu")
    for _ in range(3):
        block = walsh(block * torch.sign(_normal(dim, 1, generator)))
    return block


def walsh(x: Tensor) -> Tensor:
    """`H @ x` of the orthonormal Hadamard matrix, along the first dim, whose size is a power of two."""
    half = 1
    while half < x.shape[0]:
        pairs = x.view(-1, 2, half, x.shape[1])
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1).reshape(x.shape)
        half *= 2
    return x * x.shape[0] ** -0.5


def check_coupling(op: str, coupling: str, dim: int) -> None:
    checks.choice(op, "coupling", coupling, COUPLINGS)
    checks.coupling_dim(op, coupling, dim)


def gaussian_rows(rows: int, dim: int, coupling: str, generator: torch.Generator) -> Tensor:
    """`[rows, dim]` float64. All but "iid" couple the rows of each block of `dim`; norms are chi-distributed."""
    if coupling == "iid":
        return _normal(rows, dim, generator)
    draw = {"orthogonal": haar, "simplex": simplex, "hadamard": hadamard}[coupling]
    blocks = [draw(dim, generator) for _ in range(-(-rows // dim))]
    norms = _normal(rows, dim, generator).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:rows] * norms


def derived_seed(*parts: int) -> int:
    """A seed below 2**32 for each combination of whole numbers, the same everywhere."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
