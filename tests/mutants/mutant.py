"""A hand-made bug: replaces one piece of text in the package, and the tests named with it must turn red."""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    path: str  # below src/subquad
    old: str
    new: str
    tests: str  # arguments of pytest
