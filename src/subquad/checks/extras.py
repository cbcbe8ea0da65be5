"""Parts of subquad whose requirements come with an extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from subquad.errors import MissingPackageError


@contextmanager
def extra(part: str, name: str) -> Iterator[None]:
    """A package of others that is missing becomes an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "subquad").partition(".")[0]
        if package == "subquad":
            raise  # a bug of ours, which no installation mends
        raise MissingPackageError(f"{part} needs {package}; pip install 'subquad[{name}]'") from error
