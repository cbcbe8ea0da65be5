"""A hand-made bug: replaces one piece of text in the package, and the tests named with it must turn red."""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    path: str  # below src/subquad
    old: str
    new: str
    tests: str  # arguments of pytest

    def applied(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.name}: its text stands {text.count(self.old)} times in {self.path}, not once")
        return text.replace(self.old, self.new)
