"""Files and folders that appear whole or not at all, whatever happens to the process."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subquad.checks import runs

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

STAGING = ".writing-"
MANIFEST = "files.json"


def write_atomically(path: Path, text: str) -> None:
    """Temporary file, fsync, rename."""
    with runs.writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{STAGING}{path.name}-{os.getpid()}")
        try:
            with temporary.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def staging_for(path: Path) -> Iterator[Path]:
    """A folder beside `path` to fill and publish from; gone afterwards, whatever happened."""
    staging = path.with_name(STAGING + path.name)
    with runs.writable(path):
        try:
            staging.mkdir(parents=True, exist_ok=True)
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(complete: Path, path: Path) -> None:
    """Gives a complete folder its name: contents on disk first, then a manifest, then the rename."""
    for file in sorted(complete.rglob("*")):
        if file.is_file():
            _sync(file)
    manifest = complete / MANIFEST
    manifest.write_text(json.dumps(_digests(complete), indent=2) + "\n")
    _sync(manifest)
    sync_folder(complete)
    remove(path)
    complete.rename(path)
    sync_folder(path.parent)


def remove(folder: Path) -> None:
    """Takes the name away first, so that a folder is never half there."""
    if folder.exists():
        doomed = folder.with_name(f"{STAGING}{folder.name}-removed")
        folder.rename(doomed)
        shutil.rmtree(doomed)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone writes to the folder; the system unlocks it when the process ends, however it ends."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise runs.in_use(folder) from error
    finally:
        os.close(handle)


def sweep(folder: Path) -> list[str]:
    """Removes what an interrupted process left half-written; the names of it."""
    leftovers = sorted(folder.glob(f"{STAGING}*")) if folder.is_dir() else []
    for leftover in leftovers:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return [leftover.name for leftover in leftovers]


def verify(folder: Path) -> None:
    """Raises if a file of the folder is missing or not what was written."""
    with runs.readable_record(folder / MANIFEST):
        expected = json.loads((folder / MANIFEST).read_text())
    found = _digests(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise runs.damaged(folder, name, missing=name not in found)


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


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
