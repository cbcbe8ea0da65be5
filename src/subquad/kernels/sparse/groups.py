"""Tokens of equal code side by side: queries in tiles, keys in blocks.

Letters as in `torch.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """N groups with a code each.

    codes int64 `[N]`, ascending unless reordered. tokens int64 `[N, size]`: token index per place; `total` is padding.
    """

    codes: Tensor
    tokens: Tensor
    total: int

    def gather(self, x: Tensor) -> Tensor:
        """x `[total, ...]` in groups, `[N, size, ...]`; places of padding read an arbitrary token."""
        index = self.tokens.flatten().clamp(max=self.total - 1)
        return x.index_select(0, index).view(*self.tokens.shape, *x.shape[1:])

    def labels(self, x: Tensor, absent: int) -> Tensor:
        """Whole numbers x `[total, ...]` in groups, `absent` in places of padding."""
        padding = self.tokens == self.total
        return self.gather(x).masked_fill_(padding.view(*padding.shape, *[1] * (x.dim() - 1)), absent)

    def scatter(self, x: Tensor, nowhere: float = 0.0) -> Tensor:
        """x `[N, size, ...]` token by token, `[total, ...]`; `nowhere` for tokens that are in no group."""
        places = self.tokens.numel()
        place = self.tokens.new_full((self.total + 1,), places)
        place[self.tokens.flatten()] = torch.arange(places, device=place.device)
        place = place[:-1]
        out = x.flatten(0, 1).index_select(0, place.clamp(max=places - 1))
        return out.masked_fill_((place == places).view(-1, *[1] * (out.dim() - 1)), nowhere)


def group(codes: Tensor, size: int) -> Groups:
    """Tokens of equal code, in their order, in groups of at most `size`. codes int64 `[n]`; below 0: in no group."""
    order = codes.argsort(stable=True)[int((codes < 0).sum()) :]
    line = codes[order]
    runs, run, lengths = line.unique_consecutive(return_inverse=True, return_counts=True)
    per_run = (lengths + size - 1) // size
    within = torch.arange(len(line), device=line.device) - (lengths.cumsum(0) - lengths)[run]
    place = (per_run.cumsum(0) - per_run)[run] * size + within
    made = runs.repeat_interleave(per_run)
    tokens = codes.new_full((len(made) * size,), len(codes))
    tokens[place] = order
    return Groups(made, tokens.view(-1, size), len(codes))


def meetings(tiles: Groups, blocks: Groups, before: int, after: int) -> tuple[Groups, Tensor]:
    """The tiles, sorted by how many blocks they meet, and these `[N, W]`; rows end with padding, which is block J.

    A tile meets the blocks whose codes differ from its own by at most `before` and `after`, which are adjacent.
    """
    padding = len(blocks.codes)
    first = torch.searchsorted(blocks.codes, tiles.codes - before)
    count = torch.searchsorted(blocks.codes, tiles.codes + after, right=True) - first
    order = count.argsort(stable=True)
    place = torch.arange(max(1, int(count.max())), device=count.device)
    met = torch.where(place < count[:, None], first[:, None] + place, padding)
    return tiles._replace(codes=tiles.codes[order], tokens=tiles.tokens[order]), met[order]
