"""Kills training runs at random moments, resumes them, and compares their ends with an uninterrupted run.

python tests/kill_runs.py KILLS SEED FOLDER
"""

import random
import sys
import time
from pathlib import Path

from processes import OPTIONS, finish, fork, kill_after, quiet_train, weights
from subquad.training.metrics import MetricsFile


def main(kills: int, seed: int, folder: Path) -> None:
    whole = folder / "whole"
    begun = time.monotonic()
    assert finish(fork(lambda: quiet_train(whole))) == 0
    duration = time.monotonic() - begun
    chance, done, finished = random.Random(seed), 0, 0
    while done < kills or not finished:
        run = folder / f"run-{finished}"
        pid = fork(lambda run=run: quiet_train(run, resume=True))
        patience = chance.uniform(0, 0.6 * duration) if done < kills else 1e9
        code = kill_after(pid, patience)
        if code == -9:
            done += 1
            continue
        assert code == 0, f"resuming after {done} kills failed"
        compare(run, whole)
        finished += 1
    print(f"{done} kills, {finished} runs finished, all equal to the uninterrupted one of {OPTIONS.steps} steps")


def compare(run: Path, whole: Path) -> None:
    assert weights(run) == weights(whole), f"{run}: other weights"
    curves = [[r for r in MetricsFile(f).records() if "eval_loss" in r] for f in (run, whole)]
    for one, other in zip(*curves, strict=True):
        assert one["step"] == other["step"]
        assert one["eval_loss"] == other["eval_loss"]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
