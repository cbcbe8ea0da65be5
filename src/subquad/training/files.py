"""What the files of a run have beside being whole: checksums, and one writer at a time."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subquad import files
from subquad.checks import runs

MANIFEST = "files.json"


def write_atomically(path: Path, text: str) -> None:
    with runs.writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)


@contextmanager
def staging_for(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, to fill and publish from; gone afterwards, whatever happened."""
    with runs.writable(path), files.staging_folder(path) as staging:
        yield staging


def publish(complete: Path, path: Path) -> None:
    """Gives a complete folder its name, with checksums of its files."""
    (complete / MANIFEST).write_text(json.dumps(_digests(complete), indent=2) + "\n")
    files.publish(complete, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone writes to the folder; the system unlocks it when the process ends, however it ends."""
    try:
        handle = files.lock(folder)
    except BlockingIOError as error:
        raise runs.in_use(folder) from error
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def verify(folder: Path) -> None:
    """Raises if a file of the folder is missing or not what was written."""
    with runs.readable_record(folder / MANIFEST):
        expected = json.loads((folder / MANIFEST).read_text())
    found = _digests(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise runs.damaged(folder, name, missing=name not in found)


def _digests(folder: Path) -> dict[str, str]:
    inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _digest(path) for path in inside}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
