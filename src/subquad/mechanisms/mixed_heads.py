"""Whose the heads are: q, k and v are split among the parts of `mixed`, and outputs put together again.

Heads that stand side by side in a tensor and in their part are one run, and a view. A part of several runs is a copy:
nothing else could hold its heads in one tensor.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Partition:
    """heads: the key heads of each part, in the order in which the part counts them; together 0, 1, ..., each once.

    Example:
        >>> split = Partition([[0, 2], [1]]).split(torch.arange(6).view(1, 6))  # two query heads per key head
        >>> [part.tolist() for part in split]
        [[[0, 1, 4, 5]], [[2, 3]]]
    """

    def __init__(self, heads: Iterable[Sequence[int]]) -> None:
        self.heads = tuple(tuple(part) for part in heads)
        self.key_heads = sum(map(len, self.heads))
        runs = [_runs(part) for part in self.heads]
        order = sorted(run for part in runs for run in part)
        self._sizes = [end - begin for begin, end in order]
        self._places = [[order.index(run) for run in part] for part in runs]  # of each part's runs among all

    def split(self, x: Tensor) -> list[Tensor]:
        """x `[B, H, ...]`, H a multiple of the key heads -> `[B, heads of the part, ...]` for each part."""
        pieces = _cut(x, self._sizes, x.shape[1] // self.key_heads)
        return [_together([pieces[place] for place in places]) for places in self._places]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What `split` would make these parts of."""
        groups = sum(part.shape[1] for part in parts) // self.key_heads
        pieces: dict[int, Tensor] = {}
        for places, part in zip(self._places, parts, strict=True):
            pieces |= zip(places, _cut(part, [self._sizes[place] for place in places], groups), strict=True)
        return _together([pieces[place] for place in range(len(pieces))])


def _runs(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each row of heads that follow one another."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and runs[-1][1] == head:
            runs[-1] = (runs[-1][0], head + 1)
        else:
            runs.append((head, head + 1))
    return runs


def _cut(x: Tensor, sizes: Sequence[int], groups: int) -> Sequence[Tensor]:
    """Views of so many key heads each, whose gradients are put together at once; x itself if there is one."""
    return [x] if len(sizes) == 1 else x.split([size * groups for size in sizes], dim=1)


def _together(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
