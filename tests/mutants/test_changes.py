"""What a random draw may change, and what it leaves alone."""

import ast
from textwrap import dedent

from native_changes import native_changes
from python_changes import python_changes


def changed_python(text: str) -> set[str]:
    """Every version of the text that a draw could make."""
    text = dedent(text)
    versions = {change.applied(text) for change in python_changes("file.py", text)}
    for version in versions:
        ast.parse(version)
    return versions


def changed_native(line: str) -> set[str]:
    return {change.applied(line) for change in native_changes("file.hpp", line)}


def test_python_operators_and_constants() -> None:
    assert changed_python("a = b < 2") == {"a = b <= 2", "a = b < 3", "a = b < 1"}
    assert changed_python("a = (b) is not None") == {"a = (b) is None"}
    assert changed_python("a = b and not c") == {"a = b or not c", "a = b and c"}
    assert changed_python("a = min(b, -c)") == {"a = max(b, -c)", "a = min(b, c)"}
    assert changed_python("a = b[:c]") == {"a = b[:c + 1]"}
    assert changed_python("a = f(b, c=True)") == {"a = f(b, c=False)"}


def test_python_statements() -> None:
    assert changed_python("a.b = c") == {"pass"}
    assert changed_python("a += b") == {"pass", "a -= b"}
    text = """
        while a:
            break
    """
    assert changed_python(text) == {dedent(text).replace("break", "continue"), dedent(text).replace("a:", "not (a):")}


def test_python_that_does_not_compute_is_left_alone() -> None:
    text = '''
        """Text of 3 words."""
        from a import b

        def f(x: "int | None") -> list[int]:
            if TYPE_CHECKING:
                g(1, 2)
            y: tuple[int, int] | None
            for a in zip(c, strict=True):
                raise ValueError("not more than " + str(3), 4)
            return isinstance(x, y) or f"{a + 1}"
    '''
    assert changed_python(text) == {dedent(text).replace(" or ", " and ")}


def test_columns_are_those_of_characters() -> None:
    assert changed_python('a = "ä", b + c') == {'a = "ä", b - c'}


def test_lines_that_run_with_a_change() -> None:
    text = dedent("""
        def f(a=1):
            if a == g(
                b
            ):
                return a

        class C:
            d: int = 2
    """)
    runs = {(change.line, change.runs) for change in python_changes("file.py", text)}
    assert runs == {(2, range(3, 7)), (3, range(3, 6)), (9, range(0))}


def test_native_operators_and_constants() -> None:
    assert changed_native("  if (a < b) x = y;") == {"  if (a <= b) x = y;", "  if (!(a < b)) x = y;"}
    assert changed_native("a[i] = std::max(b, 2L) * c;") == {
        "a[i] = std::min(b, 2L) * c;",
        "a[i] = std::max(b, 2L) / c;",
        "a[i + 1] = std::max(b, 2L) * c;",
        "a[i] = std::max(b, 3L) * c;",
        "a[i] = std::max(b, 1L) * c;",
        ";",
    }
    assert changed_native("return 0.5f * f(a, false);  // 1 < 2") == {
        "return 1.5f * f(a, false);  // 1 < 2",
        "return 0.5f / f(a, false);  // 1 < 2",
        "return 0.5f * f(a, true);  // 1 < 2",
    }
    assert changed_native("task.scatter(i);") == {";"}


def test_native_that_does_not_compute_is_left_alone() -> None:
    for line in (
        "// a < b",
        "#pragma GCC unroll 8",
        "template <int ROWS, bool ADD>",
        "  float* a;",
        "  long row, panel;",
        "}",
    ):
        assert changed_native(line) == set()
