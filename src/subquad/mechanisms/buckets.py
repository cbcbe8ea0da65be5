"""Attention within buckets: what `lsh` and `cluster` share. They differ in how a vector gets its bucket.

The real keys of a bucket are numbered in order of position, and cut into blocks of `bucket_size`. A query's own block
is that of a key that would come next in the query's bucket. It sees the keys of its bucket in its own block and in the
neighbouring ones, and always its own token; with several rounds of buckets, the union of what it sees in each. So
neither later tokens nor padding move a border.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import states
from subquad.kernels.precision import without_autocast
from subquad.kernels.sparse.bucket_operator import bucket_attention
from subquad.kernels.sparse.buckets import Options
from subquad.mechanism import Mechanism, RandomFeatures, State, masked_softmax
from subquad.mechanisms import bucket_state
from subquad.mechanisms.bucket_state import BucketState
from subquad.mechanisms.census import Census

PRODUCTS_AT_ONCE = 1 << 22
TILE = 16  # small enough not to be half empty, large enough for a matrix product


def attend_in_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bucket: Tensor,
    k_bucket: Tensor,
    *,
    num_buckets: int,
    bucket_size: int,
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """q_bucket int64 `[R, B, H, T]`, k_bucket `[R, B, K, T]`; what masked tokens hold must be finite."""
    census = Census.of(k_bucket, key_mask, num_buckets)
    codes = (census.codes(bucket, bucket_size, key_mask) for bucket in (q_bucket, k_bucket))
    return bucket_attention(q, k, v, *codes, options=Options(causal, scale, min(bucket_size, TILE)))


def without_masked(key_mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros in place of whatever masked tokens hold."""
    if key_mask is None:
        return tensors
    return tuple(x.masked_fill(~key_mask[:, None, :, None], 0) for x in tensors)


def pieces(x: Tensor, products: int) -> Iterator[Tensor]:
    """x `[B, heads, T, D]` in float32, a few tokens at a time: each is compared with `products` vectors."""
    tokens = max(1, PRODUCTS_AT_ONCE // (x.shape[0] * x.shape[1] * products))
    return (some.float() for some in x.split(tokens, 2))


def visible_pairs(q_bucket: Tensor, k_bucket: Tensor, q_index: Tensor, k_index: Tensor, bucket_size: int) -> Tensor:
    """The definition: `[B, H, R, S]`, whether a query sees a key in one round.

    q_bucket `[B, H, R]`, k_bucket `[B, H, S]`; q_index, k_index: positions among real tokens, as in `dense_weights`.
    """
    real = k_index.diff(prepend=torch.full_like(k_index[:, :1], -1)) > 0  # a masked token adds nothing to the count

    def block(bucket: Tensor, index: Tensor) -> Tensor:
        earlier = real[:, None, None] & (k_index[:, None, None] < index[:, None, :, None])
        same_bucket = bucket[..., None] == k_bucket[:, :, None]
        return (earlier & same_bucket).sum(-1) // bucket_size

    q_block, k_block = block(q_bucket, q_index), block(k_bucket, k_index)
    near = (q_block[..., None] - k_block[:, :, None]).abs() <= 1
    return near & (q_bucket[..., None] == k_bucket[:, :, None])


class BucketMechanism(RandomFeatures, Mechanism):
    """Attention within buckets; a subclass says which."""

    float32_floor = 1e-5  # sums of products near 1e4 round to 1e-3 by their order, and a query may see two keys only
    num_buckets: int
    bucket_size: int
    rounds: int
    scale: float

    @abstractmethod
    def buckets(self, x: Tensor) -> Tensor:
        """int64 `[R, B, heads, T]` of x `[B, heads, T, D]`, found in float32 whatever the dtype of x."""

    @property
    def positional(self) -> bool:
        return True

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        q, k, v = without_masked(key_mask, q, k, v)
        return self._attend(q, k, v, self.buckets(q), self.buckets(k), causal, key_mask)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_bucket: Tensor,
        k_bucket: Tensor,
        causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        sizes = {"num_buckets": self.num_buckets, "bucket_size": self.bucket_size, "scale": self.scale}
        return attend_in_buckets(q, k, v, q_bucket, k_bucket, causal=causal, key_mask=key_mask, **sizes)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        visible = (q_index[:, None, :, None] == k_index[:, None, None]).expand(-1, q.shape[1], -1, -1)  # itself
        for q_bucket, k_bucket in zip(self.buckets(q), self.buckets(k), strict=True):
            visible = visible | visible_pairs(q_bucket, k_bucket, q_index, k_index, self.bucket_size)
        return masked_softmax(self.scale * q @ k.mT, seen & visible)

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        self.check_extend(q, k, v, key_mask)
        sizes = bucket_state.Sizes(self.rounds, self.num_buckets, self.bucket_size)
        past = None if state is None else self._checked(state, sizes, k, v)
        q, k, v = without_masked(key_mask, q, k, v)
        q_bucket, k_bucket = self.buckets(q), self.buckets(k)
        if past is None:
            out = self._attend(q, k, v, q_bucket, k_bucket, True, key_mask)
            empty = bucket_state.empty(sizes, k, v)
            return out, bucket_state.remember(sizes, empty, k, v, k_bucket, key_mask)
        checks.no_transforms(q, k, v)
        return bucket_state.extend(sizes, self.scale, (q, k, v), (q_bucket, k_bucket), past, key_mask)

    def join_states(self, states: Sequence[State]) -> State:
        if not all(isinstance(state, BucketState) for state in states):  # `cluster` has others, too
            return super().join_states(states)
        sizes = bucket_state.Sizes(self.rounds, self.num_buckets, self.bucket_size)
        return bucket_state.join(sizes, cast(Sequence[BucketState], states))

    def _checked(self, state: State, sizes: bucket_state.Sizes, k: Tensor, v: Tensor) -> BucketState:
        checked = states.state(self.name, state, BucketState, bucket_state.fields(sizes, k, v), k)
        states.one_value(self.name, "waiting", checked.waiting)
        return checked
