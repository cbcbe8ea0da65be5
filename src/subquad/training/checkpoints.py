"""What checkpoints are called, where a run keeps them, and which of them to continue from."""

import re
import warnings
from pathlib import Path

from subquad.checks import runs
from subquad.errors import DamageWarning
from subquad.files import remove
from subquad.training.checksums import damage

FOLDER = "checkpoints"  # of a run
PREFIX = "checkpoint-"  # transformers' own: its Trainer writes into a folder of this name, wherever it is told to
NAME = re.compile(PREFIX + r"(\d+)")


def folder_of(run: Path) -> Path:
    return run / FOLDER


def name_of(step: int) -> str:
    return f"{PREFIX}{step}"


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first; a name is given to complete ones alone."""
    found = [path for path in folder.glob(f"{PREFIX}*") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole. Damaged ones are told and passed over; if all are, that raises."""
    damages: dict[str, str] = {}
    for checkpoint in reversed(checkpoints(folder)):
        if (what := damage(checkpoint)) is not None:
            damages[checkpoint.name] = what
            continue
        if damages:
            warnings.warn(runs.passed_over(folder, damages, checkpoint), DamageWarning, stacklevel=2)
        return checkpoint
    if damages:
        raise runs.none_whole(folder, damages)
    return None


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep`."""
    for old in checkpoints(folder)[:-keep]:
        remove(old)


def model_folder(path: str | Path) -> Path:
    """The model in `path`: a model folder itself, a run's final model, or the model of its newest checkpoint."""
    path = Path(path)
    for place in (path, path / "model"):
        if (place / "config.json").is_file():
            return place
    checkpoint = newest(folder_of(path))
    if checkpoint is None:
        raise runs.no_model(path)
    return checkpoint
