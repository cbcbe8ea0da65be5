"""Run by torchrun: trains, and writes the final weights of this rank."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from processes import OPTIONS, quiet_train
from subquad.training import run as run_module


def main(folder: Path, reversible: bool) -> None:
    finish = run_module._finish

    def finish_and_write(trainer, *args, **kwargs):
        torch.save(trainer.model.state_dict(), folder / f"rank-{os.environ['RANK']}.pt")
        return finish(trainer, *args, **kwargs)

    run_module._finish = finish_and_write
    short = replace(OPTIONS, steps=6, save_every=2, eval_every=6, log_every=1, dropout=0.0, reversible=reversible)
    quiet_train(folder / "run", short)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")
