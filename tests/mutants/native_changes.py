"""Small changes of C++ code, found by regular expressions; whether they compile must be tried.

Left alone: comments, preprocessor lines, declarations without a value, templates, assertions.
"""

import re
from collections.abc import Iterator

from change import Change

SKIPPED = re.compile(
    r"\s*(//|#|using\b|template\b|namespace\b|static_assert\b|struct\b|class\b|public:|private:|[}\s;]*$)"
)
DECLARATION = re.compile(r"\s*[\w:<>*& ]+\b[\w, *]+;\s*$")
SWAPS = (
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" && ", " || "),
    (" || ", " && "),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " / "),
    (" / ", " * "),
    (" % ", " * "),
    (" += ", " -= "),
    (" -= ", " += "),
    (" *= ", " /= "),
    (" |= ", " &= "),
    ("std::max", "std::min"),
    ("std::min", "std::max"),
    ("break;", "continue;"),
    ("continue;", "break;"),
)
WORDS = ((r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"!(?=[\w(])", ""))
WHOLE_NUMBER = re.compile(r"(?<![\w.])\d+(?=L?\b(?![.\w]))")
FRACTION = re.compile(r"(?<![\w.])\d+\.\d*(e-?\d+)?(?=f?\b)")
INDEX = re.compile(r"\w\[([^\[\]]+)\](?!\()")
STATEMENT = re.compile(r"\s*((?!return\b|if\b|for\b|while\b|case\b)[\w.:>\[\]-]+(\(.*\)| [-+*/|&]?= [^;]*));$")
CONDITION = re.compile(r"\bif \(")


def native_changes(path: str, text: str) -> list[Change]:
    found, offset = [], 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = line.partition("//")[0].rstrip()
        if not SKIPPED.match(code) and not DECLARATION.match(code):
            runs = range(number, number + 1)
            found += [Change(path, number, runs, offset + a, offset + b, new) for a, b, new in _of_line(code)]
        offset += len(line)
    return found


def _of_line(code: str) -> Iterator[tuple[int, int, str]]:
    for old, new in SWAPS:
        for match in re.finditer(re.escape(old), code):
            yield match.start(), match.end(), new
    for old, new in WORDS:
        for match in re.finditer(old, code):
            yield match.start(), match.end(), new
    for match in WHOLE_NUMBER.finditer(code):
        yield match.start(), match.end(), str(int(match[0]) + 1)
        yield match.start(), match.end(), str(int(match[0]) - 1)
    for match in FRACTION.finditer(code):
        yield match.start(), match.end(), repr(float(match[0]) + 1)
    for match in INDEX.finditer(code):
        yield match.end(1), match.end(1), " + 1"
    for match in CONDITION.finditer(code):
        close = _closing(code, match.end() - 1)
        if close is not None:
            yield match.end(), close, f"!({code[match.end() : close]})"
    if match := STATEMENT.match(code):
        yield match.start(1), match.end(1), ""


def _closing(code: str, opening: int) -> int | None:
    """Where the bracket closes, if on this line."""
    depth = 0
    for place in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place
    return None
