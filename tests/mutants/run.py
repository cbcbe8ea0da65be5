"""Applies each mutant to a copy of the package and expects its tests to fail: `make mutants`."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_mutants import BENCH
from calibration_mutants import CALIBRATION
from checks_mutants import CHECKS
from cli_mutants import CLI
from conversion_mutants import CONVERSION
from data_mutants import DATA
from diagnostics_mutants import DIAGNOSTICS
from features_mutants import FEATURES
from kernels_cpu_mutants import KERNELS_CPU
from kernels_favor_mutants import KERNELS_FAVOR
from kernels_linear_mutants import KERNELS_LINEAR
from kernels_mutants import KERNELS
from kernels_sparse_mutants import KERNELS_SPARSE
from mechanisms_mutants import MECHANISMS
from models_mutants import MODELS
from mutant import Mutant
from nn_mutants import NN
from recording_mutants import RECORDING
from rich.console import Console
from rich.progress import Progress
from serving_mutants import SERVING
from testing_mutants import TESTING
from top_mutants import TOP
from training_mutants import TRAINING

from subquad.kernels.cpu import build, library

MUTANTS = (
    *BENCH,
    *CALIBRATION,
    *CHECKS,
    *CLI,
    *CONVERSION,
    *DATA,
    *DIAGNOSTICS,
    *FEATURES,
    *KERNELS,
    *KERNELS_CPU,
    *KERNELS_FAVOR,
    *KERNELS_LINEAR,
    *KERNELS_SPARSE,
    *MECHANISMS,
    *MODELS,
    *NN,
    *RECORDING,
    *SERVING,
    *TESTING,
    *TOP,
    *TRAINING,
)
ROOT = Path(__file__).parent.parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not full"]


def run_tests(root: Path, source: Path, tests: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """pytest in the tree `root`, on the package in `source`; options are those of `subprocess.run`."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*PYTEST, *tests], cwd=root, env=environment, capture_output=True, text=True, check=False, **options
    )


def red(source: Path, tests: str) -> bool:
    """Whether the tests fail on the package in `source`; anything but plain failure or success is an error."""
    done = run_tests(ROOT, source, shlex.split(tests))
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {tests} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    return done.returncode == 1


def killed(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        path = source / "subquad" / mutant.path
        path.write_text(mutant.applied(path.read_text()))
        if path.suffix == ".hpp" and isinstance(made := rebuild(path.parent.parent), str):
            sys.exit(f"the mutant does not compile:\n{made[-2000:]}")
        return red(source, mutant.tests)


def rebuild(folder: Path, *extra: str) -> Path | str:
    """The library this machine would load, or what the compiler had to say."""
    command = build.compiler()
    assert command is not None
    return build.compile_engine(folder, library.wanted_machine(), command, extra)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(map(repr, words))} in its name")
    console, survivors = Console(), []
    with Progress(console=console) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        clean = sorted({mutant.tests for mutant in chosen})
        task = progress.add_task("tests are green without mutants", total=len(clean))
        for tests, failed in zip(clean, pool.map(lambda tests: red(ROOT / "src", tests), clean), strict=True):
            progress.advance(task)
            if failed:
                console.print(f"[red]red without any mutant:[/] {tests}")
                return 2
        task = progress.add_task("mutants", total=len(chosen))
        for mutant, dead in zip(chosen, pool.map(killed, chosen), strict=True):
            progress.advance(task)
            console.print(f"{'[green]killed  ' if dead else '[red]SURVIVED'}[/] {mutant.name}")
            survivors += [] if dead else [mutant.name]
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
