"""Decoding within buckets: the last two blocks of every bucket are all that a later token can see.

A bucket's blocks are a ring: key number r of the bucket is in place r modulo twice the bucket size. The rings are
large and states are values, so new tokens wait in a short tail, which is written into the rings when it is full: the
rings are copied once in many tokens, and shared between states otherwise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.checks import states
from subquad.mechanism import masked_softmax
from subquad.mechanisms.census import Census

GAP = 1 << 40  # a key is named `bucket * GAP + number`: no bucket ever has so many keys
ABSENT = -2 * GAP


class BucketState(NamedTuple):
    """Constant in size. R rounds, N buckets, E bucket size.

    counts `[B, K, R, N]`: real keys so far, the tail's included. ring_k, ring_v `[B, K, R, N * 2E, ..]`, ring_name
    `[B, K, R, N * 2E, R]`: the last two blocks of each bucket, and the names of their keys in every round. waiting
    `[B]`: tokens in the tail. tail_k, tail_v `[B, K, 2E, ..]`, tail_name `[B, K, 2E, R]`: the newest tokens.
    """

    counts: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_name: Tensor
    waiting: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_name: Tensor


class Sizes(NamedTuple):
    rounds: int
    num_buckets: int
    bucket_size: int

    @property
    def ring(self) -> int:
        return 2 * self.bucket_size


def fields(sizes: Sizes, k: Tensor, v: Tensor) -> states.Fields:
    """What a state's tensors must be. Names in the rings are compared only; those in the tail say where to write."""
    heads, rounds, buckets = (k.shape[0], k.shape[1]), sizes.rounds, sizes.num_buckets
    rings, tail = (*heads, rounds, buckets * sizes.ring), (*heads, sizes.ring)
    return {
        "counts": states.counted(*heads, rounds, buckets, most=GAP - 1),
        "ring_k": states.kept(*rings, k.shape[3]),
        "ring_v": states.kept(*rings, v.shape[3]),
        "ring_name": states.named(*rings, rounds, empty=ABSENT),
        "waiting": states.counted(k.shape[0], most=sizes.ring),
        "tail_k": states.kept(*tail, k.shape[3]),
        "tail_v": states.kept(*tail, v.shape[3]),
        "tail_name": states.named(*tail, rounds, empty=ABSENT, low=ABSENT, high=buckets * GAP - 1),
    }


def empty(sizes: Sizes, k: Tensor, v: Tensor) -> BucketState:
    return states.empty(BucketState, fields(sizes, k, v), k)


def remember(
    sizes: Sizes, state: BucketState, k: Tensor, v: Tensor, bucket: Tensor, real: Tensor | None
) -> BucketState:
    """The state after any number of tokens, none of them waiting. bucket `[R, B, K, T]`."""
    census = Census.of(bucket, real, sizes.num_buckets)
    names = _names(sizes, state, census, bucket, real)
    state = state._replace(counts=state.counts + census.counts.permute(1, 2, 0, 3))
    return _write(sizes, state, k, v, names)


def _names(sizes: Sizes, state: BucketState, census: Census, bucket: Tensor, real: Tensor | None) -> Tensor:
    """`[B, K, T, R]`: bucket and number of new keys in each round."""
    before = census.before(bucket) + census.of_bucket(state.counts.permute(2, 0, 1, 3), bucket)
    names = (bucket * GAP + before).permute(1, 2, 3, 0)
    return names if real is None else names.masked_fill(~real[:, None, :, None], ABSENT)


def _write(sizes: Sizes, state: BucketState, k: Tensor, v: Tensor, names: Tensor) -> BucketState:
    """The rings with tokens k `[B, K, T, D]` in them, but those that later ones among them push out."""
    batch, heads, _, rounds = names.shape
    by_round = names.permute(0, 1, 3, 2)  # [B, K, R, T]
    bucket, number = (by_round // GAP).clamp(min=0), by_round % GAP
    lasts = (by_round >= 0) & (number >= state.counts.gather(3, bucket) - sizes.ring)
    ring = torch.arange(batch * heads * rounds, device=k.device).view(batch, heads, rounds, 1)
    place = (ring * sizes.num_buckets + bucket) * sizes.ring + number % sizes.ring
    place = place[lasts]

    def written(target: Tensor, x: Tensor) -> Tensor:
        tokens = x[:, :, None].expand(-1, -1, rounds, -1, -1)[lasts]
        return target.flatten(0, 3).index_copy(0, place, tokens).view_as(target)

    return state._replace(
        ring_k=written(state.ring_k, k), ring_v=written(state.ring_v, v), ring_name=written(state.ring_name, names)
    )


def extend(
    sizes: Sizes,
    scale: float,
    qkv: tuple[Tensor, Tensor, Tensor],
    bucket: tuple[Tensor, Tensor],
    state: BucketState,
    key_mask: Tensor | None,
) -> tuple[Tensor, BucketState]:
    """Outputs `[B, H, T, Dv]` of new tokens, and the state after them."""
    outs = []
    for start in range(0, qkv[0].shape[2], sizes.bucket_size):
        piece = slice(start, start + sizes.bucket_size)
        q, k, v = (x[:, :, piece] for x in qkv)
        q_bucket, k_bucket = (b[..., piece] for b in bucket)
        real = None if key_mask is None else key_mask[:, piece]
        census = Census.of(k_bucket, real, sizes.num_buckets)
        before = census.before(q_bucket) + census.of_bucket(state.counts.permute(2, 0, 1, 3), q_bucket)
        own_block = q_bucket * GAP + before // sizes.bucket_size * sizes.bucket_size
        state = _append(sizes, state, k, v, _names(sizes, state, census, k_bucket, real))
        state = state._replace(counts=state.counts + census.counts.permute(1, 2, 0, 3))
        out = _attend(sizes, scale, q, own_block, state)
        outs.append(out if real is None else out.masked_fill(~real[:, None, :, None], 0))
    return torch.cat(outs, 2), state


def _append(sizes: Sizes, state: BucketState, k: Tensor, v: Tensor, names: Tensor) -> BucketState:
    """New tokens at the end of the tail, which is emptied into the rings where they would not fit."""
    waiting, new = int(state.waiting[0]), k.shape[2]
    if waiting + new > sizes.ring:
        state, waiting = _emptied(sizes, state), 0

    def appended(tail: Tensor, x: Tensor) -> Tensor:
        return torch.cat([tail[:, :, :waiting], x, tail[:, :, waiting + new :]], 2)

    return state._replace(
        waiting=state.waiting + new,
        tail_k=appended(state.tail_k, k),
        tail_v=appended(state.tail_v, v),
        tail_name=appended(state.tail_name, names),
    )


def _emptied(sizes: Sizes, state: BucketState) -> BucketState:
    """The tail is in the rings, where its tokens are found as well."""
    state = _write(sizes, state, state.tail_k, state.tail_v, state.tail_name)
    absent = torch.full_like(state.tail_name, ABSENT)
    return state._replace(waiting=torch.zeros_like(state.waiting), tail_name=absent)


def join(sizes: Sizes, given: Sequence[BucketState]) -> BucketState:
    """All sequences in one state. Their tails must be equally full: they are emptied, if they are not."""
    if len({int(state.waiting[0]) for state in given}) > 1:
        given = [_emptied(sizes, state) for state in given]
    return BucketState(*(torch.cat(part) for part in zip(*given, strict=True)))


def _attend(sizes: Sizes, scale: float, q: Tensor, own_block: Tensor, state: BucketState) -> Tensor:
    """Of the last T tokens of the tail to what they see. own_block `[R, B, H, T]`: name of the first key there."""
    batch, key_heads, length = q.shape[0], state.tail_k.shape[1], q.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = q.to(dtype).reshape(batch, key_heads, -1, q.shape[3]) * scale  # heads of a group as rows
    blocks = own_block.permute(1, 2, 3, 0).reshape(batch, key_heads, -1, sizes.rounds)
    in_rings, ring_v, counts = _read_rings(sizes, x, blocks, state)
    place = torch.arange(sizes.ring, device=q.device)
    own = int(state.waiting[0]) - length + torch.arange(length, device=q.device).repeat(q.shape[1] // key_heads)
    seen = _meets(sizes, state.tail_name[:, :, None], blocks[:, :, :, None]).any(-1)
    seen = (seen & (place < own[:, None])) | (place == own[:, None])
    logits = torch.cat([in_rings, x @ state.tail_k.to(dtype).mT], -1)
    weights = masked_softmax(logits, torch.cat([counts, seen], -1))
    from_rings, from_tail = weights.split([in_rings.shape[-1], sizes.ring], -1)
    out = (from_rings[..., None, :] @ ring_v.to(dtype)).squeeze(-2) + from_tail @ state.tail_v.to(dtype)
    return out.reshape(*q.shape[:3], -1).to(q.dtype)


def _read_rings(sizes: Sizes, x: Tensor, blocks: Tensor, state: BucketState) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[B, K, rows, R * 2E]` with the rings of each row's buckets, their values, and which of them count."""
    batch, heads, rows = x.shape[:3]
    bucket = blocks // GAP
    ring = torch.arange(batch * heads * sizes.rounds, device=x.device).view(batch, heads, 1, sizes.rounds)
    index = (ring * sizes.num_buckets + bucket).flatten()

    def read(tensor: Tensor) -> Tensor:
        rings = tensor.reshape(-1, sizes.ring, tensor.shape[-1]).index_select(0, index)
        return rings.view(batch, heads, rows, -1, tensor.shape[-1])

    logits = (read(state.ring_k).to(x.dtype) @ x[..., None]).squeeze(-1)
    meets = _meets(sizes, read(state.ring_name), blocks[..., None, :])
    first = meets & (meets.cumsum(-1) == 1)  # a key that is met in several rounds counts in the first
    first = first.view(batch, heads, rows, sizes.rounds, sizes.ring, sizes.rounds)
    counts = first.diagonal(dim1=3, dim2=5).transpose(-1, -2)
    return logits, read(state.ring_v), counts.reshape(logits.shape)


def _meets(sizes: Sizes, name: Tensor, own_block: Tensor) -> Tensor:
    """Whether a key is of the own block or of the one before, round by round."""
    number = name - own_block
    return (number >= -sizes.bucket_size) & (number < sizes.bucket_size)
