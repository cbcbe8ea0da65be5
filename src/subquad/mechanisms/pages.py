"""Exact attention to the first tokens, to a recent window, and to the pages of the past that promise the most.

The past is cut into pages. Of each page, the extremes of its keys bound the product of any of them with a query, so the
best pages are found without looking into the others. Positions are counted in real tokens.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import checks
from subquad.checks import pages as pages_checks
from subquad.checks import states
from subquad.kernels.precision import without_autocast
from subquad.kernels.sparse.choice import extremes
from subquad.kernels.sparse.choice_operator import choose
from subquad.mechanism import Mechanism, State, masked_softmax, real_index
from subquad.mechanisms import pages_state
from subquad.mechanisms.packing import pack, slots_of, unpack
from subquad.mechanisms.pages_parts import PagesOptions, attend, keys_of
from subquad.mechanisms.pages_state import PagesState

WHY_NOT_BIDIRECTIONAL = "a query chooses pages that are full before it"


@without_autocast
def pages_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pages: int = 16,
    page: int = 16,
    window: int = 128,
    sinks: int = 4,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax over the first tokens, the pages near a query, and the `pages` of the past with the largest bounds.

    Cost: O(T (pages * page + window + T / page) D) time, O(T D) memory, forward and backward.

    Args:
        q: `[B, H, T, D]`; k: `[B, K, T, D]`; v: `[B, K, T, Dv]`, H a multiple of K.
        pages: that each query and query head chooses; 0 leaves sinks and window.
        page: tokens of a page.
        window: tokens of the pages before the own one that are always seen, a multiple of `page`.
        sinks: first tokens, which all later ones see; pages begin behind them.
        causal: must be True.
        key_mask: bool `[B, T]`, True where the token is real. Positions count real tokens only.
        scale: `1 / sqrt(D)` unless given.
    Returns:
        `[B, H, T, Dv]`. Rows of masked tokens are zero.
    Example:
        >>> pages_attention(*torch.randn(3, 1, 2, 50, 4), pages=2, page=4, window=8, causal=True).shape
        torch.Size([1, 2, 50, 4])
    """
    checks.qkv("pages", q, k, v)
    options = make_options(pages, page, window, sinks, scale, head_dim=q.shape[-1])
    checks.causal_lengths("pages", causal, q, k)
    if not causal:
        raise checks.only_causal("pages", WHY_NOT_BIDIRECTIONAL)
    checks.key_mask("pages", key_mask, k)
    return _run(options, q, k, v, key_mask)


def make_options(pages: int, page: int, window: int, sinks: int, scale: float | None, *, head_dim: int) -> PagesOptions:
    checks.count("pages", "page", page)
    return PagesOptions(
        pages=checks.count("pages", "pages", pages, minimum=0),
        page=page,
        window=pages_checks.window(window, page),
        sinks=checks.count("pages", "sinks", sinks, minimum=0),
        scale=checks.scale("pages", scale, head_dim),
    )


def _run(options: PagesOptions, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Real tokens side by side, then tokens back in their places."""
    length, dtype = q.shape[2], q.dtype
    options = options.within(length)
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    slots = None
    if key_mask is not None:
        slots = slots_of(real_index(key_mask, k), key_mask, length)
        q, k, v = (pack(x, slots, length) for x in (q, k, v))
    first = torch.zeros(1, dtype=torch.int64, device=q.device)
    q = F.pad(q, (0, 0, 0, -(length - options.sinks) % options.page))
    out = attend(options, q, keys_of(options, k, v), first)[:, :, :length]
    return (out if slots is None else unpack(out, slots)).to(dtype)


class PagesAttention(Mechanism):
    """Exact attention to sinks, a recent window, and the best pages of the past; it needs no training.

    Args:
        head_dim: D of the queries and keys.
        pages: that each query and query head chooses; 0 leaves sinks and window.
        page: tokens of a page: smaller ones are chosen better, larger ones are chosen faster.
        window: tokens of the pages before a query's own that it always sees, a multiple of `page`.
        sinks: first tokens, which all later ones see; pages begin behind them.
        scale: `1 / sqrt(head_dim)` unless given.

    Example:
        >>> attention = PagesAttention(head_dim=4, pages=2, page=4, window=8)
        >>> attention(*torch.randn(3, 1, 2, 50, 4), causal=True).shape
        torch.Size([1, 2, 50, 4])
    """

    name = "pages"
    state_grows = True  # any page may be chosen by a later query
    supports_bidirectional = False
    why_not_bidirectional = WHY_NOT_BIDIRECTIONAL

    def __init__(
        self,
        head_dim: int,
        pages: int = 16,
        *,
        page: int = 16,
        window: int = 128,
        sinks: int = 4,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = checks.count(self.name, "head_dim", head_dim)
        self.options = make_options(pages, page, window, sinks, scale, head_dim=head_dim)

    def extra_repr(self) -> str:
        o = self.options
        return (
            f"head_dim={self.head_dim}, pages={o.pages}, page={o.page}, window={o.window}, sinks={o.sinks}, "
            f"scale={o.scale:.4g}"
        )

    @property
    def positional(self) -> bool:
        return True

    @without_autocast
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        self.check_forward(q, k, v, causal, key_mask)
        return _run(self.options, q, k, v, key_mask)

    def dense_weights(self, q: Tensor, k: Tensor, seen: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        options = self.options.within(k.shape[2])
        q_page, k_page = ((index - options.sinks) // options.page for index in (q_index, k_index))
        near = (k_index < options.sinks)[:, None] | (q_page[:, :, None] - k_page[:, None] <= options.near)
        chosen = self._chosen(options, q, k, seen, q_page, k_index)
        taken = chosen.gather(3, k_page.clamp(min=0)[:, None, None].expand(*q.shape[:3], -1))
        return masked_softmax(options.scale * q @ k.mT, seen & (near[:, None] | taken))

    @staticmethod
    def _chosen(options: PagesOptions, q: Tensor, k: Tensor, seen: Tensor, q_page: Tensor, k_index: Tensor) -> Tensor:
        """bool `[B, H, R, P]`: pages that queries choose. A key that some row sees is real; others do not matter."""
        count = -(-k.shape[2] // options.page)
        behind = seen.any(2)[:, 0] & (k_index >= options.sinks)
        slots = slots_of(k_index - options.sinks, behind, count * options.page)
        bounds = extremes(pack(k, slots, count * options.page).unflatten(2, (count, -1)))
        chosen = choose(q[:, :, None], bounds, (q_page - options.near).clamp(min=0), options.pages).squeeze(2)
        return seen.new_zeros(*q.shape[:3], count + 1).scatter(3, chosen, True)[..., :-1]

    @without_autocast
    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, PagesState]:
        self.check_extend(q, k, v, key_mask)
        past = states.state(self.name, state, PagesState, pages_state.fields(self.options, k, v), k)
        pages_state.check(self.options, past)
        real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
        return pages_state.extend(self.options, q, k, v, past, real)

    def join_states(self, states: Sequence[State]) -> PagesState:
        return pages_state.join(cast(Sequence[PagesState], states))
