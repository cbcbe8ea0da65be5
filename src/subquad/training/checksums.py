"""What the files of a run have beside being whole: checksums, and one writer at a time."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad import files
from subquad.checks import runs
from subquad.errors import CheckpointError

MANIFEST, CHECKSUM = "files.json", "checksum"


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
    """Raises if a file of the folder is missing, unknown, or not what was written."""
    if (what := damage(folder)) is not None:
        raise runs.damaged(folder, what)


def damage(folder: Path) -> str | None:
    """The first thing that is wrong with the files of a folder, in words."""
    if not (folder / MANIFEST).exists():
        return runs.changed_file(MANIFEST, missing=True)
    try:
        expected, found = read_object(folder / MANIFEST), _digests(folder)
    except CheckpointError:
        return runs.bad_manifest(MANIFEST)
    except OSError as error:
        return runs.unreadable_file(error)
    if not expected or not all(isinstance(digest, str) for digest in expected.values()):
        return runs.bad_manifest(MANIFEST)
    for name, digest in expected.items():
        if found.get(name) != digest:
            return runs.changed_file(name, missing=name not in found)
    unknown = [name for name in found if name not in expected and not _is_note(name)]
    return runs.unknown_file(unknown[0], MANIFEST) if unknown else None


def _is_note(name: str) -> bool:
    """What people and systems put into folders, and nobody loads."""
    return Path(name).name.startswith(".") or name.endswith(".md")


def read_object(path: Path) -> dict[str, Any]:
    with runs.readable_record(path):
        return runs.json_object(path, json.loads(path.read_text(encoding="utf-8")))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """JSON with a checksum of itself, so that damage is seen wherever it falls."""
    write_atomically(path, json.dumps({**record, CHECKSUM: _checksum(record)}, indent=2) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    record = read_object(path)
    found = record.pop(CHECKSUM, None)
    runs.checksum(path, found, _checksum(record))
    return record


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record).encode(), digest_size=16).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): _digest(path) for path in inside}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
