"""A C++ engine under AddressSanitizer and UndefinedBehaviorSanitizer, and the environment of a process that uses it."""

import os
import shutil
import subprocess
from pathlib import Path

from subquad.kernels.cpu import build, library

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")


def sanitized_environment(folder: Path) -> dict[str, str]:
    """Builds the engine in `folder`."""
    shutil.copytree(library.FOLDER / build.SOURCES, folder / build.SOURCES)
    command = build.compiler()
    assert command is not None
    engine = build.compile_engine(folder, "generic", command, FLAGS)
    assert isinstance(engine, Path), engine
    # the C++ library too: the sanitizer looks for what throws when it starts, and torch throws
    libraries = ("libasan.so", "libstdc++.so.6")
    preload = [_output([*command, f"-print-file-name={name}"]) for name in libraries]
    return os.environ | {
        "SUBQUAD_CPU": str(engine),
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # leaks: Python's own; null: as without it
    }


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
