"""Small changes of Python code, found in its syntax tree, so that what comes out is valid.

Left alone: imports, annotations, strings and what stands in them, docstrings, `raise` statements.
"""

import ast
import re
from collections.abc import Iterator
from itertools import accumulate

from change import Change

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
COMMUTATIVE = ("torch.promote_types", "torch.maximum", "torch.minimum", "torch.logaddexp", "math.gcd")
ORDERED = ("isinstance", "issubclass", "getattr", "hasattr", "setattr")  # swapped arguments of these are no code


def python_changes(path: str, text: str) -> list[Change]:
    return list(_Finder(path, text).found())


class _Finder:
    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.tree = path, text, ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]

    def found(self) -> Iterator[Change]:
        for statement, runs in _statements(self.tree.body):
            for start, end, new in self._of_statement(statement):
                line = self.text.count("\n", 0, start) + 1
                yield Change(self.path, line, runs, start, end, new)

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())  # ast counts bytes

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _segment(self, node: ast.expr) -> str:
        return self.text[self._start(node) : self._end(node)]

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, int, str]]:
        """The operator between two expressions; brackets and line ends may stand there too."""
        begin = self._end(left)
        if match := re.search(old, self.text[begin : self._start(right)]):
            yield begin + match.start(), begin + match.end(), new

    def _of_statement(self, statement: ast.stmt) -> Iterator[tuple[int, int, str]]:
        whole = self._start(statement), self._end(statement)
        match statement:
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield *whole, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield *whole, "pass"
            case ast.Break():
                yield *whole, "continue"
            case ast.Continue():
                yield *whole, "break"
        if isinstance(statement, ast.AugAssign) and (pair := OPERATORS.get(type(statement.op))):
            yield from self._between(statement.target, statement.value, re.escape(pair[0]), pair[1])
        if isinstance(statement, (ast.If, ast.While)):
            yield self._start(statement.test), self._end(statement.test), f"not ({self._segment(statement.test)})"
        for expression in _own_expressions(statement):
            yield from self._of_expression(expression)

    def _of_expression(self, node: ast.expr) -> Iterator[tuple[int, int, str]]:
        """Changes of an expression and of all in it."""
        if isinstance(node, ast.JoinedStr):
            return
        yield from self._of_node(node)
        for child in ast.iter_child_nodes(node):
            yield from self._below(child)

    def _below(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.expr):
            yield from self._of_expression(node)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            return  # of zip: an assertion, which says nothing where code is right
        else:  # comprehensions, keywords, arguments of a lambda
            for child in ast.iter_child_nodes(node):
                yield from self._below(child)

    def _of_node(self, node: ast.expr) -> Iterator[tuple[int, int, str]]:
        start, end = self._start(node), self._end(node)
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                old, new = COMPARISONS[type(operator)]
                yield from self._between(left, right, old, new)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS and not _text(
                left, right
            ):
                old, new = OPERATORS[type(operator)]
                yield from self._between(left, right, re.escape(old), new)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                old, new = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield from self._between(left, right, old, new)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield start, self._start(operand), ""
            case ast.Constant(value=bool(value)):
                yield start, end, str(not value)
            case ast.Constant(value=int(value) | float(value)):
                yield start, end, repr(value + 1)
                yield start, end, repr(value - 1) if value >= 1 else f"({value - 1!r})"
            case ast.Name(id=name) if name in NAMES:
                yield start, end, NAMES[name]
            case ast.Call(args=[first, second, *_]) if self._can_swap(node):
                between = self.text[self._end(first) : self._start(second)]
                yield self._start(first), self._end(second), self._segment(second) + between + self._segment(first)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        yield self._start(bound), self._end(bound), f"{self._segment(bound)} + 1"

    def _can_swap(self, call: ast.Call) -> bool:
        """Whether the first two arguments may be of one kind: not if one is `self`, or a name for a message."""
        first, second = map(self._segment, call.args[:2])
        alike = not _text(*call.args[:2]) and not any(isinstance(node, ast.Starred) for node in call.args[:2])
        told_apart = self._segment(call.func) not in (*ORDERED, *COMMUTATIVE, *NAMES)
        return alike and first != second and "self" not in (first, second) and told_apart


def _statements(body: list[ast.stmt], called: bool = False) -> Iterator[tuple[ast.stmt, range]]:
    """Every statement that may be changed, and the lines that run whenever it does: none if importing the file runs it,
    for whichever test came first did that."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Raise)) or _is_for_types(statement):
            continue
        last = statement.end_lineno or statement.lineno
        inner = _inner(statement)
        function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        if function:  # its defaults show when it is called
            yield statement, range(statement.body[0].lineno, last + 1)
        elif called:
            yield statement, range(statement.lineno, inner[0].lineno if inner else last + 1)
        else:
            yield statement, range(0)
        yield from _statements(inner, called or function)


def _inner(node: ast.AST) -> list[ast.stmt]:
    """Statements directly inside a statement, those of its `except` and `case` included."""
    children = list(ast.iter_child_nodes(node))
    handlers = [child for child in children if isinstance(child, (ast.ExceptHandler, ast.match_case))]
    return [child for child in children if isinstance(child, ast.stmt)] + [s for h in handlers for s in _inner(h)]


def _is_for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Without annotations, and without what belongs to statements inside."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from statement.decorator_list
        yield from (value for value in (*statement.args.defaults, *statement.args.kw_defaults) if value is not None)
        return
    for name, value in ast.iter_fields(statement):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr):
                yield child
            elif isinstance(child, ast.withitem):
                yield child.context_expr


def _text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )
