"""Compiles the native CPU engine while the package is built: one library for each kind of machine.

Without a compiler, or where it fails, the package is built all the same; `subquad doctor` says what is missing.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/subquad/kernels/cpu")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"),
)
OPENMP = {"darwin": ("-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup")}
MACHINES = {"generic": (), "x86_64_v3": ("-march=x86-64-v3",), "x86_64_v4": ("-march=x86-64-v4",)}


def machines() -> list[str]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [name for name in MACHINES if x86 or name == "generic"]


def compiler() -> list[str] | None:
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return [found] if found else None


def fingerprint(folder: Path) -> str:
    """As in `library.py`, which cannot be imported here: it needs torch."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.[hc]pp")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_engine(command: list[str], root: Path, machine: str, extra: tuple[str, ...] = ()) -> Path | str:
    """The library, relative to root, or what the compiler had to say."""
    library = FOLDER / f"engine_{machine}.so"
    begin = [*command, *FLAGS, f'-DSUBQUAD_SOURCES="{fingerprint(root / FOLDER)}"', *MACHINES[machine], *extra]
    end = [str(FOLDER / "engine.cpp"), "-o", str(library)]  # relative names: no path of this machine in the library
    failure = ""
    for openmp in (OPENMP.get(sys.platform, ("-fopenmp",)), ()):  # in one thread rather than not at all
        done = subprocess.run([*begin, *openmp, *end], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return library
        failure = failure or done.stderr
    return failure


class NativeEngine(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("SUBQUAD_NATIVE") == "0":
            return
        command = compiler()
        if command is None:
            self.app.display_warning("no C++ compiler found: built without the native CPU engine")
            return
        with ThreadPoolExecutor() as threads:
            built = list(threads.map(lambda m: compile_engine(command, Path(self.root), m), machines()))
        libraries = [library for library in built if isinstance(library, Path)]
        for failure in (failure for failure in built if isinstance(failure, str)):
            self.app.display_warning(f"part of the native CPU engine was not built:\n{failure}")
        if libraries:
            build_data["pure_python"] = False
            platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform_tag}"  # the libraries know nothing of Python
            build_data["artifacts"] += [str(library) for library in libraries]
