"""CSV that a spreadsheet shows as it is, whatever is in it."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets run cells that begin so
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")


def csv_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The lines of a CSV file. Text that a spreadsheet would run as a formula gets a `'` in front.

    Example:
        >>> print(csv_table(["name", "score"], [["=1+1", "-2.5"], ["P1", -3]]), end="")
        name,score
        '=1+1,-2.5
        P1,-3
    """
    return "".join(map(_line, [header, *rows]))


def _line(row: Sequence[object]) -> str:
    """csv puts quotes around the characters that end its lines, which must be both that readers know."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow([_cell(x) for x in row])
    return out.getvalue().removesuffix("\r\n") + "\n"


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
