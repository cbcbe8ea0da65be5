"""Compiles the C++ engine, one library for each kind of machine. Run as a script, it does so in place.

The package's build runs this file where neither torch nor subquad is installed, so it imports neither.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = "src"  # a folder beside this file
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
MACHINES = {"generic": (), "x86_64_v3": ("-march=x86-64-v3",), "x86_64_v4": ("-march=x86-64-v4",)}


class Built(NamedTuple):
    libraries: list[Path]
    failures: list[str]  # messages of the compiler


def machines() -> list[str]:
    """Those that this processor's compiler can make code for."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [name for name in MACHINES if x86 or name == "generic"]


def compiler() -> list[str] | None:
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return [found] if found else None


def fingerprint(folder: Path) -> str:
    """Of the sources: a library made from others is not used."""
    digest = hashlib.sha256()
    for source in sorted((folder / SOURCES).glob("*.[hc]pp")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_engine(folder: Path, machine: str, command: list[str], extra: tuple[str, ...] = ()) -> Path | str:
    """The library in `folder`, or why there is none."""
    library = folder / f"engine_{machine}.so"
    begin = [*command, *FLAGS, f'-DSUBQUAD_SOURCES="{fingerprint(folder)}"', *MACHINES[machine], *extra]
    end = [f"{SOURCES}/engine.cpp", "-o", library.name]  # relative names: no path of this machine in the library
    try:
        done = subprocess.run([*begin, *end], cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return library if done.returncode == 0 else done.stderr


def build(folder: Path = FOLDER) -> Built:
    command = compiler()
    if command is None:
        return Built([], ["no C++ compiler found"])
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda machine: compile_engine(folder, machine, command), machines()))
    return Built([r for r in results if isinstance(r, Path)], [r for r in results if isinstance(r, str)])


def main() -> int:
    built = build()
    for library in built.libraries:
        print(library.name)
    for failure in built.failures:
        print(failure, file=sys.stderr)
    return 1 if built.failures else 0


if __name__ == "__main__":
    sys.exit(main())
