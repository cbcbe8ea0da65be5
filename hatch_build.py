"""Compiles the native CPU engine while the package is built.

Without a compiler, or where it fails, the package is built all the same; `subquad doctor` says what is missing.
"""

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/subquad/kernels/cpu")


class NativeEngine(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("SUBQUAD_NATIVE") == "0":
            return
        engine = runpy.run_path(str(Path(self.root) / FOLDER / "build.py"))
        built = engine["build"](Path(self.root) / FOLDER)
        for failure in built.failures:
            self.app.display_warning(f"the native CPU engine is not complete:\n{failure}")
        if built.libraries:
            platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag}"  # the libraries know nothing of Python
            build_data["artifacts"] += [str(FOLDER / library.name) for library in built.libraries]
