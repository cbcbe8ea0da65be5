"""Progress of long work: a bar, a function of the caller, or nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Tell = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@contextmanager
def telling(progress: bool | Tell) -> Iterator[Tell]:
    """A function to report progress to: the caller's own, a bar on a terminal, or one that does nothing."""
    if callable(progress):
        yield progress
    elif progress and sys.stderr.isatty() and find_spec("rich") is not None:
        with _bar() as tell:
            yield tell
    else:
        yield silent


@contextmanager
def _bar() -> Iterator[Tell]:
    """On stderr; gone when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
