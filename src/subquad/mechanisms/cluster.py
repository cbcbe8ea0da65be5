"""Attention to what falls into the same cluster: the Routing Transformer's, with clusters that only `update` moves.

See `buckets.py` for what a query sees. A vector's cluster is the centroid with which it has the largest inner product;
centroids have length one, so what counts is the angle (spherical k-means).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from subquad import checks
from subquad.checks import buckets as bucket_checks
from subquad.checks import states
from subquad.features.draws import derived_seed
from subquad.features.positive import FeatureMap, draw_rows, positive_map
from subquad.kernels.precision import without_autocast
from subquad.kernels.problem import FLOOR
from subquad.mechanism import State, masked_softmax
from subquad.mechanisms import cluster_features
from subquad.mechanisms.buckets import BucketMechanism, attend_in_buckets, pieces, without_masked
from subquad.mechanisms.cluster_features import FieldState
from subquad.mechanisms.favor import log_estimate

INSIDES = ("exact", "favor")


@without_autocast
def cluster_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    centroids: Tensor,
    *,
    bucket_size: int = 64,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over the keys in the query's cluster that are near it there.

    Cost: O(T (bucket_size D + clusters D)) time, O(T D) memory, forward and backward.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, T, D]`; v: `[B, K, T, Dv]`, H a multiple of K.
        centroids: `[1 or K, clusters, D]`.
        bucket_size: keys per block of a cluster. A query sees the block it falls into and the neighbouring ones.
        key_mask: bool `[B, T]`, True where the token is real. Rows of masked tokens are zero.
        scale: of the logits, `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`.
    Example:
        >>> cluster_attention(*torch.randn(3, 1, 2, 5, 4), torch.randn(1, 3, 4)).shape
        torch.Size([1, 2, 5, 4])
    """
    checks.qkv("cluster", q, k, v)
    bucket_checks.per_head("cluster", "centroids", centroids, "clusters", k)
    checks.key_mask("cluster", key_mask, k)
    checks.causal_lengths("cluster", causal, q, k)
    checks.self_attention("cluster", q, k)
    q, k, v = without_masked(key_mask, q, k, v)
    return attend_in_buckets(
        q,
        k,
        v,
        assigned(q, centroids),
        assigned(k, centroids),
        num_buckets=centroids.shape[1],
        bucket_size=checks.count("cluster", "bucket_size", bucket_size),
        causal=causal,
        key_mask=key_mask,
        scale=checks.scale("cluster", scale, q.shape[3]),
    )


@torch.no_grad()
def assigned(x: Tensor, centroids: Tensor) -> Tensor:
    """Clusters int64 `[1, B, heads, T]` of x `[B, heads, T, D]`, by float32 products whatever the dtype of x."""
    centroids = centroids.float()
    if centroids.shape[0] > 1:
        centroids = centroids.repeat_interleave(x.shape[1] // centroids.shape[0], 0)
    return torch.cat([(some @ centroids.mT).argmax(-1) for some in pieces(x, centroids.shape[1])], 2)[None]


class ClusterAttention(BucketMechanism):
    """Attention of a Routing Transformer.

    Beside the contract it assigns tokens, and keeps and moves centroids, hence more methods than other mechanisms.

    Args:
        head_dim: D of the queries and keys.
        num_clusters: about length / bucket_size is a good number.
        inside: "exact" attention to blocks of a cluster, or "favor": all of it, by random features.
        bucket_size: of "exact", 64 unless given: keys per block of a cluster. A query sees the block it falls into and
            the neighbouring ones, and itself.
        num_features: of "favor", 256 unless given; one draw for all heads.
        num_heads: heads of k, for centroids of its own in each; None for the same in all.
        decay: of the moving average that centroids are.
        scale: of the logits, `1 / sqrt(head_dim)` unless given.
        seed: of the first centroids, uniform over the sphere, and of the features. Only `update` moves the former, only
            `redraw` the latter.

    Example:
        >>> attention = ClusterAttention(head_dim=4, num_clusters=8)
        >>> q, k, v = torch.randn(3, 1, 2, 50, 4)
        >>> attention.update(q, k)
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "cluster"
    rounds = 1
    centroids: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_clusters: int = 64,
        inside: str = "exact",
        bucket_size: int | None = None,
        num_features: int | None = None,
        num_heads: int | None = None,
        decay: float = 0.99,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.num_clusters = self.num_buckets = checks.count(self.name, "num_clusters", num_clusters)
        checks.choice(self.name, "inside", inside, INSIDES)
        bucket_checks.inside_options(inside, bucket_size, num_features)
        self.inside, self.bucket_size = inside, checks.optional_count(self.name, "bucket_size", bucket_size) or 64
        self.num_features = checks.optional_count(self.name, "num_features", num_features) or 256
        self.num_heads = checks.optional_count(self.name, "num_heads", num_heads)
        self.decay = checks.probability(self.name, "decay", decay)
        self.scale = checks.scale(self.name, scale, head_dim)
        self.seed = checks.seed(self.name, seed)
        self.register_buffer("centroids", self._draw())
        self.register_buffer("weight", self._draw_features(self.seed) if inside == "favor" else None)

    def extra_repr(self) -> str:
        favor = self.weight is not None
        size = f"num_features={self.num_features}" if favor else f"bucket_size={self.bucket_size}"
        return (
            f"head_dim={self.head_dim}, num_clusters={self.num_clusters}, inside={self.inside!r}, {size}, "
            f"num_heads={self.num_heads}, decay={self.decay}, scale={self.scale:.4g}"
        )

    def buckets(self, x: Tensor) -> Tensor:
        return assigned(x, self.centroids)

    def redraw(self, seed: int) -> None:
        """Fresh random features, in place; centroids stay. States made before belong to the old features."""
        if self.weight is None:
            raise bucket_checks.nothing_to_redraw()
        self.weight.copy_(self._draw_features(seed))

    def reset_parameters(self) -> None:
        """Centroids and features of the constructor's seed."""
        self.centroids.copy_(self._draw())
        if self.weight is not None:
            self.redraw(self.seed)

    def check_heads(self, q: Tensor, k: Tensor) -> None:
        bucket_checks.per_head(self.name, "centroids", self.centroids, "clusters", k)

    # Features inside --------------------------------------------------------------------------------------------------

    @property
    def positional(self) -> bool:
        return self.weight is None

    @property
    def _map(self) -> FeatureMap:
        assert self.weight is not None
        return positive_map(self.weight)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        if self.weight is None:
            return super().dense_weights(q, k, seen, q_index, k_index)
        same_cluster = self.buckets(q)[0][..., None] == self.buckets(k)[0][:, :, None]
        x, y = (t * self.scale**0.5 for t in (q, k))
        return masked_softmax(log_estimate(x, y, self._map), seen & same_cluster)

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        if self.weight is None:
            return super().forward(q, k, v, causal=causal, key_mask=key_mask)
        self.check_forward(q, k, v, causal, key_mask)
        return self._by_features(q, k, v, causal, key_mask, None)[0]

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        if self.weight is None:
            return super().extend(q, k, v, state, key_mask=key_mask)
        self.check_extend(q, k, v, key_mask)
        past = None if state is None else states.state(self.name, state, FieldState, self._fields(k, v), k)
        return self._by_features(q, k, v, True, key_mask, past)

    def _fields(self, k: Tensor, v: Tensor) -> states.Fields:
        shape = (*k.shape[:2], self.num_clusters, self.num_features)
        return {"far_max": states.summed(*shape, least=FLOOR), "far_sum": states.summed(*shape, v.shape[3] + 1)}

    def _by_features(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, state: FieldState | None
    ) -> tuple[Tensor, FieldState]:
        k, v = without_masked(key_mask, k, v)
        clusters = self.buckets(q)[0], self.buckets(k)[0], self.num_clusters
        options = {"causal": causal, "key_mask": key_mask, "scale": self.scale, "state": state}
        return cluster_features.attend(q, k, v, clusters, self._map, **options)

    # Centroids --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @without_autocast
    def update(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> None:
        """Moves the centroids, in place, towards the mean directions of the queries and keys that are theirs.

        Every vector counts by its direction only. A cluster without vectors stays where it is. Under
        torch.distributed sums are taken over all ranks, so that centroids stay equal on them: all must call this.
        """
        checks.qk(self.name, q, k)
        checks.head_dim(self.name, self.head_dim, q)
        checks.self_attention(self.name, q, k)
        checks.key_mask(self.name, key_mask, k)
        self.check_heads(q, k)
        q, k = without_masked(key_mask, q, k)  # masked vectors are zero, and so is their direction
        total = self._sum_of_directions(q) + self._sum_of_directions(k)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        mean = F.normalize(total, dim=-1, eps=torch.finfo(total.dtype).tiny)
        moved = F.normalize(self.decay * self.centroids + (1 - self.decay) * mean, dim=-1)
        has_vectors = (total != 0).any(-1, keepdim=True)
        self.centroids.copy_(torch.where(has_vectors, moved, self.centroids))

    def _sum_of_directions(self, x: Tensor) -> Tensor:
        """`[heads of the centroids, clusters, D]`, float32."""
        heads, clusters, dim = self.centroids.shape
        groups = x.shape[1] // heads
        owner = torch.arange(x.shape[1], device=x.device)[:, None] // groups
        row = (owner * clusters + assigned(x, self.centroids)[0]).flatten()
        sums = torch.zeros(heads * clusters, dim, device=x.device)
        return sums.index_add_(0, row, F.normalize(x.float(), dim=-1).flatten(0, 2)).view(heads, clusters, dim)

    def _draw(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        shape = (self.num_heads or 1, self.num_clusters, self.head_dim)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return F.normalize(drawn, dim=-1).float().to(torch.get_default_device())

    def _draw_features(self, seed: int) -> Tensor:
        own_seed = derived_seed(checks.seed(self.name, seed), 1)
        return draw_rows(self.head_dim, self.num_features, coupling="orthogonal", num_heads=None, seed=own_seed).weight
