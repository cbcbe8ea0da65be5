"""Training in child processes that can be killed. Forked from a parent that has imported everything, so that a start
takes a moment; the parent must not have computed anything before (threads do not survive a fork)."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from subquad.data import load_proteins
from subquad.training import Result, TrainOptions, train

OPTIONS = TrainOptions(
    window=128,
    layers=2,
    hidden=16,
    heads=2,
    attention_options={"num_features": 8, "near": 16},
    dropout=0.1,
    steps=24,
    save_every=2,
    eval_every=8,
    eval_samples=2,
    log_every=3,
    redraw_every=5,
    threads=1,
)


def quiet_train(folder: Path, options: TrainOptions = OPTIONS, **kwargs: object) -> Result:
    return train(load_proteins(), folder, options, console=Console(quiet=True), **kwargs)  # pyright: ignore


def fork(work: Callable[[], object]) -> int:
    """Runs `work` in a child process; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def finish(pid: int) -> int:
    """Waits; the exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_after(pid: int, seconds: float) -> int:
    """kill -9 after some time; the exit code, -9 unless the process was faster."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return finish(pid)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()
