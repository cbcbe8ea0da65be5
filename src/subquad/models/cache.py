"""What `generate()` keeps between tokens: the states of the mechanisms, of constant size where they are."""

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from subquad.checks import count
from subquad.checks import models as checks
from subquad.mechanism import State, reorder_state, state_bytes
from subquad.nn import LayerState

SomeCache = TypeVar("SomeCache", bound="SubquadCache")


class StateLayer(CacheLayerMixin):
    """The state of one layer. Its tensors are replaced, never written to."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | LayerState | None = None
        self.tokens = 0

    def set(self, state: State | LayerState, new_tokens: int) -> None:
        self.state, self.tokens = state, self.tokens + new_tokens
        self.is_initialized = True

    def take(self, other: "StateLayer") -> None:
        """From now on the same state as another layer, whatever happens to that one."""
        self.state, self.tokens, self.is_initialized = other.state, other.tokens, other.is_initialized

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def reset(self) -> None:
        self.state, self.tokens, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = reorder_state(self.state, beam_idx.to(self.state[-1].device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            batch = self.state[-1].shape[0]
            self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise checks.state_cache_only("lazy_initialization")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise checks.state_cache_only("update")

    def crop(self, tokens_to_remove: int) -> None:
        raise checks.state_cache_only("crop")


class SubquadCache(Cache):
    """One state per layer, and how many real tokens each sequence has had.

    Example:
        >>> cache = SubquadCache(num_layers=2)
        >>> cache.get_seq_length(), cache.nbytes()
        (0, 0)
    """

    layers: list[StateLayer]
    layer_class: ClassVar[type[StateLayer]] = StateLayer

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self.layer_class() for _ in range(num_layers)])
        self.length: Tensor | None = None  # [B]: real tokens so far, which is where the next token stands

    def advance(self, batch: int, new: int, key_mask: Tensor | None, device: torch.device) -> Tensor:
        """Positions `[B or 1, new]` of the next tokens; counts them as seen."""
        if key_mask is None and self.length is None:
            self.length = torch.full((batch,), new, device=device)
            return torch.arange(new, device=device)[None]
        before = torch.zeros(batch, dtype=torch.int64, device=device) if self.length is None else self.length
        real = torch.ones(batch, new, dtype=torch.bool, device=device) if key_mask is None else key_mask
        self.length = before + real.sum(-1)
        return (before[:, None] + real.cumsum(-1) - 1).clamp(min=0)

    def snapshot(self: SomeCache) -> SomeCache:
        """The cache as it is now, which later tokens do not change. All tensors are shared: they are only replaced."""
        new = type(self)(len(self.layers))
        new.restore(self)
        return new

    def restore(self, kept: "SubquadCache") -> None:
        """Takes back all tokens since `kept`, a snapshot; that stays good for another time."""
        checks.like_this_cache(self, kept)
        for layer, old in zip(self.layers, kept.layers, strict=True):
            layer.take(old)
        self.length = kept.length

    def fork(self: SomeCache, copies: int) -> SomeCache:
        """Another cache that has each sequence `copies` times, side by side: one prompt, many continuations."""
        count("fork", "copies", copies)
        new = self.snapshot()
        new.batch_repeat_interleave(copies)
        return new

    def select(self: SomeCache, rows: Sequence[int] | Tensor) -> SomeCache:
        """Another cache, of these sequences only, in this order."""
        new = self.snapshot()
        new.batch_select_indices(torch.as_tensor(rows, dtype=torch.int64))
        return new

    def nbytes(self) -> int:
        """Memory of all states."""
        return sum(state_bytes(layer.state) for layer in self.layers if layer.state is not None)

    def reset(self) -> None:
        super().reset()
        self.length = None

    def _select(self, index: Tensor) -> None:
        if self.length is not None:
            self.length = self.length[index.to(self.length.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.length is not None:
            self.length = self.length.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)
