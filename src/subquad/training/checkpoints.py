"""Where a run keeps its checkpoints, and which of them to continue from."""

import re
from pathlib import Path

from subquad.checks import runs
from subquad.files import remove, sweep
from subquad.training.files import verify

NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def newest(folder: Path) -> Path | None:
    """The checkpoint to continue from; leftovers of an interrupted write are removed, damage raises."""
    sweep(folder)
    found = checkpoints(folder)
    if not found:
        return None
    verify(found[-1])
    return found[-1]


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep`."""
    for old in checkpoints(folder)[:-keep]:
        remove(old)


def model_folder(path: str | Path) -> Path:
    """The model in `path`: a model folder itself, a run's final model, or the model of its newest checkpoint."""
    path = Path(path)
    places = [path, path / "model", *reversed(checkpoints(path / "checkpoints"))]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise runs.no_model(path)
