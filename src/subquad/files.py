"""Files and folders that appear whole or not at all, whatever happens to the process that writes them.

Everything is written under another name beside its place, brought to disk, and given its name in one step. The process
that writes holds a lock on it; what is not locked was left over by a process that has ended, and is swept.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks: nothing is swept there
    fcntl = None

STAGING = ".writing-"
_OURS = re.compile(re.escape(STAGING) + r"[0-9a-f]{16}(\..*)?")
_REPLACED = "replaced"  # in a staging folder: the folder whose place the new one takes


@contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Yields a new file to write to, with the suffix of `path`; it becomes `path` if the block succeeds.

    If it fails, or the process ends, what `path` was before stays. A pipe or a device is written as it is.
    """
    place = Path(os.path.realpath(path))  # of a link, what it points to is written
    if place.exists() and not place.is_file() and not place.is_dir():
        yield place
        return
    _refuse_read_only(place)
    sweep(place.parent)
    staging, lock = _claim(place.parent, place.suffix, lambda new: new.touch(exist_ok=False))
    try:
        yield staging
        _sync(staging)
        if place.exists():
            shutil.copymode(place, staging)
        staging.replace(place)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    finally:
        _release(lock)
    sync_folder(place.parent)


def write_text(path: str | Path, text: str) -> None:
    """As UTF-8, whatever the locale."""
    with written(path) as staging:
        staging.write_bytes(text.encode())


def save_figure(figure: Any, path: str | Path, dpi: int = 130) -> None:
    """A figure of matplotlib, in the format that the suffix names."""
    with written(path) as staging:
        figure.savefig(staging, dpi=dpi)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A new, empty folder beside `path`, to fill and to `publish` from; gone afterwards, whatever happened."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    staging, lock = _claim(path.parent, "", Path.mkdir)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _release(lock)


def publish(complete: Path, path: Path) -> None:
    """Gives a complete folder inside a staging folder its name.

    A folder that has the name already waits in the staging folder, from where `sweep` brings it back if the process
    ends between the two steps.
    """
    sync_tree(complete)
    old = complete.parent / _REPLACED / path.name
    replaced = path.exists()
    if replaced:
        old.parent.mkdir()
        path.rename(old)
    try:
        complete.rename(path)
    except BaseException:
        if replaced:
            old.rename(path)
        raise
    sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Takes the name away first, so that a folder is never half there."""
    if folder.exists():
        doomed = _new_name(folder.parent)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what stays is swept


def sweep(folder: Path) -> None:
    """Removes what processes that have ended left half-written, and brings back what they were about to replace."""
    with suppress(OSError):  # what cannot be seen or removed stays
        for leftover in sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name)):
            with suppress(OSError):  # BlockingIOError: its process lives
                _clear(leftover)


def lock(path: Path) -> int | None:
    """A handle that locks `path` until it is closed or the process ends, however it ends.

    BlockingIOError if another holds it; None where the system has no locks.
    """
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def sync_tree(folder: Path) -> None:
    """Brings all files below the folder to disk, and their names."""
    inside = sorted(folder.rglob("*"))
    for path in inside:
        if path.is_file():
            _sync(path)
    for path in (*(path for path in inside if path.is_dir()), folder):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Makes renames inside the folder last."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _refuse_read_only(place: Path) -> None:
    """A rename would replace a file that its owner has protected."""
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def _new_name(folder: Path, suffix: str = "") -> Path:
    return folder / f"{STAGING}{secrets.token_hex(8)}{suffix}"


def _claim(folder: Path, suffix: str, make: Callable[[Path], object]) -> tuple[Path, int | None]:
    """Something new to write to, and its lock. A sweep that comes between the two takes it, and it is made again."""
    while True:
        staging = _new_name(folder, suffix)
        make(staging)
        with suppress(BlockingIOError, FileNotFoundError):
            handle = lock(staging)
            if staging.exists():
                return staging, handle
            _release(handle)


def _release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def _clear(leftover: Path) -> None:
    if leftover.is_symlink() or not (leftover.is_file() or leftover.is_dir()):
        return  # not ours
    handle = lock(leftover)
    if handle is None:
        return
    try:
        if leftover.is_file():
            leftover.unlink()
            return
        for old in (leftover / _REPLACED).glob("*"):
            if not (place := leftover.parent / old.name).exists():
                old.rename(place)
        shutil.rmtree(leftover)
    finally:
        os.close(handle)
