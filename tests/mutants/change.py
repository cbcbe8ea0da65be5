"""One small change of a source file, as a random draw makes it."""

from typing import NamedTuple


class Change(NamedTuple):
    path: str  # below src/subquad
    line: int
    runs: range  # lines one of which runs whenever the changed code does; none if importing the file runs it
    start: int  # of the replaced piece in the text of the file
    end: int
    new: str

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def lines(self, text: str) -> tuple[str, str]:
        """The line before and after; of a longer statement, its first line."""
        number = self.line - 1
        return text.splitlines()[number].strip(), self.applied(text).splitlines()[number].strip()
