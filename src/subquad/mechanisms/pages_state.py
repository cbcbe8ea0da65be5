"""Decoding with pages. Sequences of one batch may be at different positions.

The newest tokens wait in a short line until they fill it; then their whole pages are stored with their extremes. So the
pages, which every state holds as a value of its own, are copied once in `window` tokens and shared between states
otherwise. Whatever waits is near to the newest token, and what it may choose from is stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.checks import pages as pages_checks
from subquad.checks import states
from subquad.kernels.sparse.choice import Extremes, extremes
from subquad.kernels.sparse.choice_operator import choose
from subquad.kernels.sparse.torch import ABSENT_KEY
from subquad.mechanism import masked_softmax
from subquad.mechanisms.packing import fitted, pack, put, slots_of, unpack
from subquad.mechanisms.pages_parts import Keys, PagesOptions, attend, in_pages


class PagesState(NamedTuple):
    """Grows with the length. P pages of E tokens, R places of waiting tokens.

    length `[B]`: real tokens so far; stored `[B]`: pages. sink_k, sink_v `[B, K, sinks, ..]`: the first tokens. page_k,
    page_v `[B, K, P, E, ..]`, high, low `[B, K, P, D]`: pages and their extremes. wait_k, wait_v `[B, K, R, ..]`: the
    tokens behind them, oldest first.
    """

    length: Tensor
    stored: Tensor
    sink_k: Tensor
    sink_v: Tensor
    page_k: Tensor
    page_v: Tensor
    high: Tensor
    low: Tensor
    wait_k: Tensor
    wait_v: Tensor


def fields(options: PagesOptions, k: Tensor, v: Tensor) -> states.Fields:
    """What a state's tensors must be."""
    heads, dim, value_dim = k.shape[:2], k.shape[3], v.shape[3]
    return {
        "length": states.counted(heads[0]),
        "stored": states.counted(heads[0]),
        "sink_k": states.kept(*heads, options.sinks, dim),
        "sink_v": states.kept(*heads, options.sinks, value_dim),
        "page_k": states.kept(*heads, "P", options.page, dim),
        "page_v": states.kept(*heads, "P", options.page, value_dim),
        "high": states.summed(*heads, "P", dim),
        "low": states.summed(*heads, "P", dim),
        "wait_k": states.kept(*heads, options.room, dim),
        "wait_v": states.kept(*heads, options.room, value_dim),
    }


def check(options: PagesOptions, state: PagesState) -> None:
    """That its counts fit together."""
    pages = state.page_k.shape[2]
    pages_checks.stored(state.length, state.stored, pages, options.page, options.room, options.sinks)


def join(given: Sequence[PagesState]) -> PagesState:
    """All sequences in one state, zeros behind the pages of shorter ones."""
    most = int(torch.cat([state.stored for state in given]).max())
    grows = ("page_k", "page_v", "high", "low")
    level = (state._replace(**{name: fitted(getattr(state, name), most) for name in grows}) for state in given)
    return PagesState(*(torch.cat(part) for part in zip(*level, strict=True)))


def extend(
    options: PagesOptions, q: Tensor, k: Tensor, v: Tensor, state: PagesState, real: Tensor
) -> tuple[Tensor, PagesState]:
    """real `[B, T]`: new tokens that are there."""
    if q.shape[2] == 1:
        return _step(options, q, k, v, state, real)
    position = state.length[:, None] + real.cumsum(-1) - 1
    waiting = _waiting(options, state)
    size = -(-(int(waiting.max()) + k.shape[2]) // options.page) * options.page
    place = position - options.sinks - options.page * state.stored[:, None]  # in the line of waiting and new tokens
    length = state.length + real.sum(-1)
    state = _with_sinks(options, state, k, v, position, real)._replace(length=length)
    slots = slots_of(place, real & (position >= options.sinks), size)
    line_k, line_v = (_put_behind(*pair, slots, size) for pair in ((state.wait_k, k), (state.wait_v, v)))
    whole = _with_pages(options, state, line_k, line_v)
    q_slots = torch.where(position < options.sinks, position, place + options.sinks)
    q_slots = slots_of(q_slots, real, options.sinks + size)
    out = attend(options, _full(pack(q, q_slots, options.sinks + size)), _keys(options, whole), state.stored)
    return unpack(out, q_slots).to(q.dtype), _stored(options, whole, line_k, line_v)


def _waiting(options: PagesOptions, state: PagesState) -> Tensor:
    """How many tokens wait, `[B]`."""
    return (state.length - options.sinks).clamp(min=0) - options.page * state.stored


def _full(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _put_behind(waiting: Tensor, new: Tensor, slots: Tensor, size: int) -> Tensor:
    """The waiting tokens, cut or padded to a line of so many places, and new ones in their slots."""
    return put(F.pad(waiting, (0, 0, 0, size - waiting.shape[2])), new, slots)


def _with_sinks(
    options: PagesOptions, state: PagesState, k: Tensor, v: Tensor, position: Tensor, real: Tensor
) -> PagesState:
    among = real & (position < options.sinks)
    if not bool(among.any()):
        return state
    slots = slots_of(position, among, options.sinks)
    return state._replace(sink_k=put(state.sink_k, k, slots), sink_v=put(state.sink_v, v, slots))


def _with_pages(options: PagesOptions, state: PagesState, line_k: Tensor, line_v: Tensor) -> PagesState:
    """The pages of a line `[B, K, n * E, ..]` behind the stored ones of each sequence; the last may not be whole."""
    new_k, new_v = (x.unflatten(2, (-1, options.page)) for x in (line_k, line_v))
    most = int(state.stored.max())
    level = bool((state.stored == most).all())
    slots = state.stored[:, None] + torch.arange(new_k.shape[2], device=new_k.device)

    def behind(old: Tensor, new: Tensor) -> Tensor:
        if level:
            return torch.cat([old[:, :, :most], new], 2)
        old = F.pad(old[:, :, :most].flatten(3), (0, 0, 0, new.shape[2]))
        return put(old, new.flatten(3), slots).view(*old.shape[:3], *new.shape[3:])

    found = extremes(new_k)
    return state._replace(
        page_k=behind(state.page_k, new_k),
        page_v=behind(state.page_v, new_v),
        high=behind(state.high, found.high),
        low=behind(state.low, found.low),
    )


def _stored(options: PagesOptions, state: PagesState, line_k: Tensor, line_v: Tensor) -> PagesState:
    """With the whole pages of the line stored, and its other tokens waiting; the line is among the pages already."""
    total = _waiting(options, state)[:, None]
    done = total // options.page
    left = options.page * done + torch.arange(options.room, device=total.device)
    slots = slots_of(left, left < total, line_k.shape[2])
    stored = state.stored + done[:, 0]
    most = int(stored.max())
    page_k, page_v, high, low = (  # side by side, as every step reads them
        x[:, :, :most].contiguous() for x in (state.page_k, state.page_v, state.high, state.low)
    )
    waiting = (unpack(x, slots) for x in (line_k, line_v))
    return PagesState(state.length, stored, state.sink_k, state.sink_v, page_k, page_v, high, low, *waiting)


def _keys(options: PagesOptions, state: PagesState) -> Keys:
    place = torch.arange(options.sinks, device=state.length.device)
    place = torch.where(place < state.length[:, None], place, ABSENT_KEY)
    sink_k, sink_v = (_full(x) for x in (state.sink_k, state.sink_v))
    page_k, page_v = (
        in_pages(sinks, _full(pages.flatten(2, 3)), options.page)
        for sinks, pages in ((sink_k, state.page_k), (sink_v, state.page_v))
    )
    return Keys(sink_k, sink_v, place, page_k, page_v, Extremes(state.high, state.low))


# One token ------------------------------------------------------------------------------------------------------------


def _step(
    options: PagesOptions, q: Tensor, k: Tensor, v: Tensor, state: PagesState, real: Tensor
) -> tuple[Tensor, PagesState]:
    if bool((_waiting(options, state) == options.room).any()):
        whole = _with_pages(options, state, state.wait_k, state.wait_v)
        state = _stored(options, whole, state.wait_k, state.wait_v)
    position, waiting = state.length[:, None], _waiting(options, state)[:, None]
    slots = slots_of(waiting, real & (position >= options.sinks), options.room)
    new = _with_sinks(options, state, k, v, position, real)._replace(
        length=state.length + real[:, 0], wait_k=put(state.wait_k, k, slots), wait_v=put(state.wait_v, v, slots)
    )
    x = _full(q).view(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, K, G, D]
    listed = _listed(options, x, new, new.stored[:, None] + waiting // options.page)
    few_k, few_v = (_full(torch.cat(pair, 2)) for pair in ((new.sink_k, new.wait_k), (new.sink_v, new.wait_v)))
    far_k, far_v = (_full(_read(pages, listed)) for pages in (new.page_k, new.page_v))
    seen = torch.cat([_few_seen(options, new, listed), _whole(listed < new.page_k.shape[2], options.page)], -1)
    logits = torch.cat([x @ few_k.mT, (far_k @ x[..., None]).squeeze(-1)], -1)
    weights = masked_softmax(options.scale * logits, seen & real[:, :, None, None])
    to_few, to_far = weights.split([few_k.shape[2], far_k.shape[3]], -1)
    out = to_few @ few_v + (to_far[..., None, :] @ far_v).squeeze(-2)
    return out.reshape(*q.shape[:3], -1).to(q.dtype), new


def _listed(options: PagesOptions, x: Tensor, state: PagesState, own: Tensor) -> Tensor:
    """Stored pages `[B, K, G, N]` that a query of page `own` `[B, 1]` sees, near ones first; P for none."""
    count = state.page_k.shape[2]
    chosen = choose(
        x[:, :, :, None], Extremes(state.high, state.low), (own - options.near).clamp(min=0), options.pages
    ).squeeze(3)
    near = own - 1 - torch.arange(min(options.near, count), device=own.device)
    near = torch.where((near >= 0) & (near < state.stored[:, None]), near, count)
    return torch.cat([near[:, None, None].expand(*chosen.shape[:3], -1), chosen], -1)


def _read(pages: Tensor, listed: Tensor) -> Tensor:
    """`[B, K, G, N * E, D]` of pages `[B, K, P, E, D]`; an arbitrary page where none is listed."""
    (batch, heads, count, page, dim), (groups, width) = pages.shape, listed.shape[2:]
    head = torch.arange(batch * heads, device=pages.device).view(batch, heads, 1, 1)
    index = (head * count + listed.clamp(max=count - 1)).flatten()
    return pages.flatten(0, 2).index_select(0, index).view(batch, heads, groups, width * page, dim)


def _few_seen(options: PagesOptions, state: PagesState, listed: Tensor) -> Tensor:
    """Which sinks and waiting tokens are there, `[B, K, G, sinks + R]`."""
    there = [
        torch.arange(size, device=count.device) < count[:, None]
        for size, count in ((options.sinks, state.length), (options.room, _waiting(options, state)))
    ]
    return torch.cat(there, 1)[:, None, None].expand(*listed.shape[:3], -1)


def _whole(pages: Tensor, page: int) -> Tensor:
    """For each page, the same for all of its tokens."""
    return pages.repeat_interleave(page, -1)
