"""Checks of paged attention."""

from typing import Any

from torch import Tensor

from subquad.checks import count
from subquad.checks.states import values_of
from subquad.errors import ConfigError, ShapeError


def window(value: Any, page: int) -> int:
    """A window of whole pages."""
    if count("pages", "window", value, minimum=0) % page:
        raise ConfigError(f"pages: window must be a multiple of the page of {page} tokens, got {value}")
    return value


def stored(length: Tensor, stored: Tensor, pages: int, page: int, room: int, sinks: int) -> None:
    """Pages that the state holds, and behind them no more tokens than fit into what is waiting."""
    for tokens, number in zip(values_of(length) or (), values_of(stored) or (), strict=False):
        if number > pages:
            raise ShapeError(f"pages: state.stored says {number} pages, but the state holds {pages}; it was changed")
        waiting = max(tokens - sinks, 0) - number * page
        if not 0 <= waiting <= room:
            raise ShapeError(
                f"pages: state.length says {tokens} tokens, but {number} pages of {page} are stored, {sinks} tokens "
                f"are sinks and {room} can wait; the state was changed"
            )
