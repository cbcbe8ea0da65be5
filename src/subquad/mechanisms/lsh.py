"""Attention to what falls into the same bucket of a locality-sensitive hash: the Reformer's, corrected.

See `buckets.py` for what a query sees. The hash is the nearest of the directions +-r_1, ..., +-r_n of a random rotation
(cross-polytope hashing): the closer two vectors in angle, the likelier they meet.
"""

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import buckets as bucket_checks
from subquad.features.draws import haar
from subquad.kernels.precision import without_autocast
from subquad.mechanisms.buckets import BucketMechanism, attend_in_buckets, pieces, without_masked


@without_autocast
def lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotations: Tensor,
    *,
    bucket_size: int = 64,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over the keys that share a bucket block with the query in one of the rounds.

    Cost: O(T rounds (bucket_size D + buckets D)) time, O(T D) memory, forward and backward.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, T, D]`; v: `[B, K, T, Dv]`, H a multiple of K.
        rotations: from `draw_rotations`, `[1 or K, rounds, hashes, directions, D]`; a hash has a bucket for each
            direction and for its opposite, a round one for each combination of its hashes' buckets.
        bucket_size: keys per block of a bucket.
        key_mask: bool `[B, T]`, True where the token is real. Rows of masked tokens are zero.
        scale: of the logits, `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`.
    Example:
        >>> lsh_attention(*torch.randn(3, 1, 2, 5, 4), draw_rotations(head_dim=4, num_buckets=4)).shape
        torch.Size([1, 2, 5, 4])
    """
    checks.qkv("lsh", q, k, v)
    bucket_checks.per_head("lsh", "rotations", rotations, "rounds, hashes, directions", k)
    checks.key_mask("lsh", key_mask, k)
    checks.causal_lengths("lsh", causal, q, k)
    checks.self_attention("lsh", q, k)
    num_buckets = (2 * rotations.shape[3]) ** rotations.shape[2]
    bucket_checks.not_too_many(num_buckets)
    q, k, v = without_masked(key_mask, q, k, v)
    return attend_in_buckets(
        q,
        k,
        v,
        hashed(q, rotations),
        hashed(k, rotations),
        num_buckets=num_buckets,
        bucket_size=checks.count("lsh", "bucket_size", bucket_size),
        causal=causal,
        key_mask=key_mask,
        scale=checks.scale("lsh", scale, q.shape[3]),
    )


def draw_rotations(
    head_dim: int,
    num_buckets: int = 64,
    rounds: int = 4,
    *,
    hashes: int = 1,
    num_heads: int | None = None,
    seed: int = 0,
) -> Tensor:
    """float32 `[num_heads or 1, rounds, hashes, directions, head_dim]`; same seed, same bits.

    Directions are rows of rotations, uniform over the orthogonal group; beyond `head_dim` of a further one.

    Example:
        >>> draw_rotations(head_dim=4, num_buckets=6, rounds=2).shape
        torch.Size([1, 2, 1, 3, 4])
    """
    directions = bucket_checks.num_buckets(num_buckets, hashes)
    checks.count("lsh", "head_dim", head_dim)
    checks.count("lsh", "rounds", rounds)
    heads = checks.optional_count("lsh", "num_heads", num_heads) or 1
    generator = torch.Generator("cpu").manual_seed(checks.seed("lsh", seed))
    turns = -(-directions // head_dim)
    drawn = [haar(head_dim, generator) for _ in range(heads * rounds * hashes * turns)]
    rows = torch.stack(drawn).view(heads, rounds, hashes, turns * head_dim, head_dim)[..., :directions, :]
    return rows.float().contiguous().to(torch.get_default_device())


@torch.no_grad()
def hashed(x: Tensor, rotations: Tensor) -> Tensor:
    """Buckets int64 `[rounds, B, heads, T]` of x `[B, heads, T, D]`, by float32 products whatever the dtype of x."""
    rotations = rotations.float()
    if rotations.shape[0] > 1:
        rotations = rotations.repeat_interleave(x.shape[1] // rotations.shape[0], 0)
    found = [[_bucket(some, turns) for turns in rotations.unbind(1)] for some in pieces(x, rotations.shape[3])]
    return torch.cat([torch.stack(rounds) for rounds in found], 3)


def _bucket(x: Tensor, turns: Tensor) -> Tensor:
    """Combined buckets of all hashes of one round. turns `[heads or 1, hashes, directions, D]`."""
    out = x.new_zeros(x.shape[:3], dtype=torch.int64)
    for turn in turns.unbind(1):
        out = out * (2 * turn.shape[1]) + _nearest(x @ turn.mT)
    return out


def _nearest(products: Tensor) -> Tensor:
    """Which of the directions r_1, ..., r_n, -r_1, ..., -r_n has the largest product. `[..., n] -> [...]`."""
    direction = products.abs().argmax(-1, keepdim=True)
    opposite = products.gather(-1, direction) < 0
    return (direction + opposite * products.shape[-1]).squeeze(-1)


class LshAttention(BucketMechanism):
    """Attention of a Reformer, without what leaks or moves in it.

    Args:
        head_dim: D of the queries and keys.
        num_buckets: buckets per round; about length / bucket_size is a good number.
        bucket_size: keys per block of a bucket. A query sees the block it falls into and the neighbouring ones.
        rounds: hashes whose buckets are united; the error falls with them, time grows with them.
        hashes: rotations per round, whose buckets combine: many buckets for little time. `num_buckets` must be an even
            number to the power of `hashes`.
        num_heads: heads of k, for rotations of its own in each (query heads that share a key head share them);
            None draws once for all.
        scale: of the logits, `1 / sqrt(head_dim)` unless given.
        seed: of the rotations. Only `redraw` changes them.

    Example:
        >>> attention = LshAttention(head_dim=4, num_buckets=8)
        >>> attention(*torch.randn(3, 1, 2, 50, 4), causal=True).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "lsh"
    weight: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        head_dim: int,
        *,
        num_buckets: int = 64,
        bucket_size: int = 64,
        rounds: int = 4,
        hashes: int = 1,
        num_heads: int | None = None,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.bucket_size = checks.count(self.name, "bucket_size", bucket_size)
        self.num_buckets, self.rounds, self.hashes = num_buckets, rounds, hashes
        self.num_heads, self.seed = num_heads, seed
        self.scale = checks.scale(self.name, scale, head_dim)
        self.register_buffer("weight", self._draw(seed))

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, num_buckets={self.num_buckets}, bucket_size={self.bucket_size}, "
            f"rounds={self.rounds}, hashes={self.hashes}, num_heads={self.num_heads}, scale={self.scale:.4g}"
        )

    def buckets(self, x: Tensor) -> Tensor:
        return hashed(x, self.weight)

    def redraw(self, seed: int) -> None:
        """Fresh rotations, in place. States made before belong to the old ones."""
        self.weight.copy_(self._draw(seed))

    def reset_parameters(self) -> None:
        """The rotations of the constructor's seed, for modules materialised from the meta device."""
        self.redraw(self.seed)

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        bucket_checks.per_head(self.name, "rotations", self.weight, "rounds, hashes, directions", k)

    def _draw(self, seed: int) -> Tensor:
        return draw_rotations(
            self.head_dim, self.num_buckets, self.rounds, hashes=self.hashes, num_heads=self.num_heads, seed=seed
        )
