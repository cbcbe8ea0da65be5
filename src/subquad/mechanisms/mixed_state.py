"""What `mixed` remembers: the tensors of the states of its parts, side by side in one NamedTuple.

Which classes those states have is known once the parts have made them, so the class is made then, once for each
combination.
"""

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from subquad.checks import mixed as mixed_checks
from subquad.mechanism import State


class Owner(NamedTuple):
    """A part: its name, which its fields begin with, and its key heads."""

    name: str
    heads: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} on {list(self.heads)}"


def joined_state(owners: tuple[Owner, ...], parts: Sequence[State]) -> State:
    """The state of the whole; parts: of each part."""
    kind = state_class(owners, tuple(type(part) for part in parts))
    return kind(*(tensor for part in parts for tensor in part))


def parts_of_state(owners: tuple[Owner, ...], state: Any) -> Sequence[State | None]:
    """The states of the parts; of their tensors, each part checks its own."""
    if state is None:
        return [None] * len(owners)
    of = getattr(type(state), "owners", None)
    if of != owners or len(state) != len(state._fields):
        named = f"a {type(state).__name__} of {_list(of)}" if of else type(state).__name__
        raise mixed_checks.other_state(_list(owners), named)
    tensors = iter(state)
    return [kind(*(next(tensors) for _ in kind._fields)) for kind in type(state).kinds]


def _list(owners: Sequence[Owner]) -> str:
    return " and ".join(map(str, owners))


@functools.cache
def state_class(owners: tuple[Owner, ...], kinds: tuple[Any, ...]) -> Any:
    """The NamedTuple with the fields of these states; fields of each are called after its part: `favor0_far_max`."""
    fields = [f"{owner.name}_{field}" for owner, kind in zip(owners, kinds, strict=True) for field in kind._fields]
    members = {"__slots__": (), "__reduce__": _reduce, "owners": owners, "kinds": kinds}
    return type("MixedState", (namedtuple("MixedState", fields),), members)


def _reduce(state: Any) -> tuple[Any, ...]:
    """For pickle, which finds no class that is made when it is needed."""
    return _restored, (type(state).owners, type(state).kinds, tuple(state))


def _restored(owners: tuple[Owner, ...], kinds: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> State:
    return state_class(owners, kinds)(*tensors)
