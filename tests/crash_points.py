"""Lets a training run die at every file operation of its checkpoints, one after another, and resumes it each time.

python tests/crash_points.py FIRST LAST FOLDER
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from processes import OPTIONS, finish, fork, quiet_train, weights
from subquad import files

SHORT = replace(OPTIONS, steps=6, save_every=2, eval_every=6, keep=1)
CRASHED = 17


def crash_at(number: int) -> None:
    """The process ends, without any clean-up, just before the numbered operation."""
    count = 0

    def counted(operation):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os._exit(CRASHED)
            return operation(*args, **kwargs)

        return run

    files._sync, files.sync_folder = counted(files._sync), counted(files.sync_folder)
    for method in ("rename", "replace", "write_text", "write_bytes", "touch", "mkdir", "unlink"):
        setattr(Path, method, counted(getattr(Path, method)))
    shutil.rmtree = counted(shutil.rmtree)


def main(first: int, last: int, folder: Path) -> None:
    whole = folder / "whole"
    assert finish(fork(lambda: quiet_train(whole, SHORT))) == 0
    crashes = 0
    for number in range(first, last):
        run = folder / f"run-{number}"

        def dying(run: Path = run, number: int = number) -> None:
            crash_at(number)
            quiet_train(run, SHORT)

        code = finish(fork(dying))
        assert code in (0, CRASHED), f"operation {number}: exit code {code}"
        crashes += code == CRASHED
        assert finish(fork(lambda run=run: quiet_train(run, SHORT, resume=True))) == 0, f"operation {number}: resume"
        assert weights(run) == weights(whole), f"operation {number}: other weights"
        leftovers = [path.name for path in run.rglob(".writing-*")]
        assert not leftovers, f"operation {number}: {leftovers}"
        shutil.rmtree(run)
    print(f"{crashes} crashes, each followed by a whole run")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
