"""How many keys of a bucket come before a token: what numbers keys, and cuts buckets into blocks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Census(NamedTuple):
    """Real keys by bucket and position `[R, B, K, T]`, and where each bucket begins there `[R, B, K, buckets + 1]`."""

    line: Tensor
    starts: Tensor

    @classmethod
    def of(cls, bucket: Tensor, real: Tensor | None, num_buckets: int) -> "Census":
        """bucket int64 `[R, B, K, T]` of the keys, real `[B, T]`."""
        length = bucket.shape[-1]
        address = bucket * length + torch.arange(length, device=bucket.device)
        if real is not None:
            address = address.masked_fill(~real[:, None], num_buckets * length)
        line = address.contiguous().sort(-1).values
        borders = torch.arange(num_buckets + 1, device=bucket.device) * length
        starts = torch.searchsorted(line, borders.expand(*line.shape[:-1], -1).contiguous())
        return cls(line, starts)

    @property
    def counts(self) -> Tensor:
        """Real keys in each bucket, `[R, B, K, buckets]`."""
        return self.starts.diff()

    def of_bucket(self, numbers: Tensor, bucket: Tensor) -> Tensor:
        """numbers `[R, B, K, buckets]` of each token's bucket. bucket `[R, B, heads, T]`, heads a multiple of K."""
        return numbers.gather(-1, self._by_key_head(bucket)).view(bucket.shape)

    def before(self, bucket: Tensor) -> Tensor:
        """How many real keys of its bucket come before a token."""
        length = self.line.shape[-1]
        address = self._by_key_head(bucket * length + torch.arange(length, device=bucket.device))
        return torch.searchsorted(self.line, address).view(bucket.shape) - self.of_bucket(self.starts, bucket)

    def codes(self, bucket: Tensor, bucket_size: int, real: Tensor | None) -> Tensor:
        """The block that a token belongs to, int32 `[R, B, heads, T]`, -1 for masked tokens.

        Blocks of a bucket are neighbours; between buckets two numbers are left out, because the own block of a query
        may be one past the last, and the neighbour of that must be no block of another bucket.
        """
        blocks = (self.counts + bucket_size - 1) // bucket_size + 2
        first = blocks.cumsum(-1) - blocks
        code = self.of_bucket(first, bucket) + self.before(bucket) // bucket_size
        return (code if real is None else code.masked_fill(~real[:, None], -1)).int()

    def _by_key_head(self, x: Tensor) -> Tensor:
        """x `[R, B, heads, T]` with the heads that share a key head in one row."""
        return x.reshape(*x.shape[:2], self.line.shape[2], -1).contiguous()
