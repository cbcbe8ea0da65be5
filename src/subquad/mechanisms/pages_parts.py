"""What paged attention sees: sinks, near pages and chosen ones, each a part with its own log-normaliser.

Letters as in `sparse/choice.py`, and H = K * G query heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.sparse.bands import attend_to_few
from subquad.kernels.sparse.choice import Extremes, extremes
from subquad.kernels.sparse.choice_operator import choose
from subquad.kernels.sparse.lines import padded
from subquad.kernels.sparse.pages import chosen_pages, near_pages
from subquad.kernels.sparse.torch import merge


class PagesOptions(NamedTuple):
    """pages: how many a query chooses; page, window: tokens, the window a multiple of the page."""

    pages: int
    page: int
    window: int
    sinks: int
    scale: float

    @property
    def near(self) -> int:
        """Whole pages before a query's own that it sees without choosing them."""
        return self.window // self.page

    @property
    def room(self) -> int:
        """Tokens that wait for their pages to be stored: all of them are near to the newest."""
        return self.window + self.page

    def within(self, length: int) -> "PagesOptions":
        """The same for so many tokens: one page holds all of them, and no memory is for more."""
        return self._replace(page=min(self.page, length), sinks=min(self.sinks, length))


class Keys(NamedTuple):
    """What queries see. sink_k `[B, K, sinks, D]`, sink_v; page_k `[B, K, F + P, E, D]`, page_v: F pages of the sinks
    with zeros up to the last place, then the others; extremes of those.

    sink_place `[B, sinks]`: positions, ABSENT_KEY for a sink that is not there.
    """

    sink_k: Tensor
    sink_v: Tensor
    sink_place: Tensor
    page_k: Tensor
    page_v: Tensor
    extremes: Extremes


def keys_of(options: PagesOptions, k: Tensor, v: Tensor) -> Keys:
    """All keys of whole sequences `[B, K, T, ..]`, T no less than the sinks; the last page may end with zeros."""
    sinks = options.sinks
    place = torch.arange(sinks, device=k.device).expand(k.shape[0], -1)
    page_k, page_v = (in_pages(x[:, :, :sinks], x[:, :, sinks:], options.page) for x in (k, v))
    bounds = extremes(page_k[:, :, -(-sinks // options.page) :])
    return Keys(k[:, :, :sinks], v[:, :, :sinks], place, page_k, page_v, bounds)


def in_pages(sinks: Tensor, others: Tensor, page: int) -> Tensor:
    """`[B, K, F + P, E, D]` of sinks and others `[B, K, .., D]`, each with zeros up to whole pages."""
    return torch.cat([padded(sinks, page), padded(others, page)], 2).unflatten(2, (-1, page))


def attend(options: PagesOptions, q: Tensor, keys: Keys, first: Tensor) -> Tensor:
    """`[B, H, sinks + n * E, Dv]`.

    q `[B, H, sinks + n * E, D]`: the sinks, and n pages, of which the first is page `first` `[B or 1]`.
    """
    sinks, body = q[:, :, : options.sinks], q[:, :, options.sinks :]
    outs = [_sinks(options, sinks, keys)] if options.sinks else []
    outs += [_body(options, body, keys, first)] if body.shape[2] else []
    return torch.cat(outs, 2)


def _sinks(options: PagesOptions, q: Tensor, keys: Keys) -> Tensor:
    """Of the sinks to those before them."""
    place = torch.arange(options.sinks, device=q.device)[None]
    return attend_to_few(q, keys.sink_k, keys.sink_v, place, keys.sink_place, True, options.scale)[0]


def _body(options: PagesOptions, q: Tensor, keys: Keys, first: Tensor) -> Tensor:
    """Of the pages of queries to all that they see."""
    parts = [near_pages(q, keys.page_k, keys.page_v, first, (options.sinks, options.near), options.scale)]
    if options.pages and keys.extremes.high.shape[2] > options.near + 1:
        own = first[:, None] + torch.arange(q.shape[2], device=q.device) // options.page
        candidates = (own - options.near).clamp(min=0)
        chosen = choose(q.unflatten(1, (keys.page_k.shape[1], -1)), keys.extremes, candidates, options.pages)
        parts.append(chosen_pages(q, keys.page_k, keys.page_v, chosen, options.sinks, options.scale))
    return merge(*(list(x) for x in zip(*parts, strict=True)))
