"""Checks of runs: their folders, options, checkpoints and models."""

import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from subquad.errors import CheckpointError, ConfigError, SubquadError, TrainingError


def positive(op: str, name: str, value: Any, *, zero: bool = False) -> None:
    """A finite number a float32 can hold; above 0, or from 0 on."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0 <= value < 1e38) or (value == 0 and not zero):
        raise ConfigError(
            f"{op}: {name} must be a {'number of at least 0' if zero else 'positive number'}, got {value!r}"
        )


def threads(count: int | None) -> None:
    if count is not None and count > 1024:
        raise ConfigError(f"train: threads must be at most 1024, got {count}")


def precision(name: str, gpu: bool) -> None:
    if name == "float16" and not gpu:
        raise ConfigError("train: precision='float16' needs a GPU; use bfloat16 or float32")


def writable_folder(folder: Path) -> None:
    """Exists afterwards, and a file can be made in it."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """A disk that is full, read-only or gone is one clear error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error}); nothing was lost") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); nothing was lost") from error
    except RuntimeError as error:
        if not _about_writing(error):
            raise
        raise CheckpointError(f"{path}: cannot be written ({error}); nothing was lost") from error


def _about_writing(error: RuntimeError) -> bool:
    """torch.save reports a full disk as a RuntimeError of its zip writer."""
    return any(word in str(error) for word in ("PytorchStreamWriter", "file write", "unexpected pos", "iostream"))


@contextmanager
def readable_record(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; the folder is no run or was changed by hand") from error
    except SubquadError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); it is damaged, or was changed by hand or by another version"
        ) from error


def json_object(path: Path, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(found).__name__}; it is damaged")
    return found


def checksum(path: Path, found: Any, wanted: str) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{path}: is not what was written, its checksum differs; use a copy that is whole, or begin another run "
            "with the weights of this one (--init)"
        )


def free_folder(folder: Path, resume: bool) -> None:
    """Empty, or holding no more than an interrupted beginning of a run."""
    found = sorted(path.name for path in folder.iterdir())
    if not found:
        return
    if resume:
        raise CheckpointError(f"{folder}: is not a run (no run.json, but {found[0]}); choose another folder")
    raise CheckpointError(f"{folder}: is not empty; continue the run in it with --resume, or choose another folder")


def same_run(folder: Path, differences: Sequence[str]) -> None:
    if differences:
        raise CheckpointError(
            f"{folder}: was begun with other settings ({'; '.join(differences)}); "
            "resume with those of the run, or begin another"
        )


@contextmanager
def same_shape(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of another kind, depth, width or mechanism
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder}: does not fit the model to be trained ({reason})") from error


@contextmanager
def loadable_checkpoint(path: Any) -> Iterator[None]:
    """What was written can still be of another version, or made to run code."""
    try:
        with no_pickled_code(path):
            yield
    except SubquadError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: cannot be loaded ({reason}); it is of another version or model") from error


@contextmanager
def no_pickled_code(path: Any) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds a pickle that would run code, which is never loaded; use weights as safetensors, or a "
            "checkpoint that subquad has written"
        ) from error


def same_weights(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing or unexpected:
        raise CheckpointError(
            f"resume: the checkpoint is of another model (missing {', '.join(missing) or 'nothing'}; "
            f"unknown {', '.join(unexpected) or 'nothing'})"
        )


def agreed(error: Exception | None) -> None:
    """Raises on every process what the first one has refused."""
    if error is not None:
        raise error


def something_to_redraw(every: int, drawn: int) -> None:
    if every and not drawn:
        raise ConfigError(f"train: redraw_every={every}, but no layer has random features; leave it out")


# Errors to raise ------------------------------------------------------------------------------------------------------


def damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {what}; use a copy that is whole, or --resume the run that made it")


def changed_file(name: str, *, missing: bool) -> str:
    return f"{name} {'is missing' if missing else 'is not what was written'}"


def unknown_file(name: str, manifest: str) -> str:
    return f"{name} is not among the files of {manifest}"


def bad_manifest(manifest: str) -> str:
    return f"{manifest} is no list of files with their checksums"


def unreadable_file(error: OSError) -> str:
    return f"{Path(error.filename).name if error.filename else 'a file'} cannot be read ({error.strerror or error})"


def passed_over(folder: Path, damages: Mapping[str, str], taken: Path) -> str:
    return f"{folder}: {_listed(damages)}; taking {taken.name}"


def none_whole(folder: Path, damages: Mapping[str, str]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: no checkpoint is whole, {_listed(damages)}; remove the folder of the run to begin again"
    )


def _listed(damages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} is damaged ({what})" for name, what in damages.items())


def made_again(error: CheckpointError) -> str:
    return f"{error}; it is made again from the last checkpoint"


def damaged_lines(path: Path, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"{path}: {len(numbers)} damaged lines are left out ({shown})"


def in_use(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder}: another process is training in this folder; wait for it, or choose another")


def no_model(path: Path) -> CheckpointError:
    what = "holds no model (no config.json), nor is it a run with a checkpoint" if path.exists() else "does not exist"
    return CheckpointError(f"{path}: {what}; give a run folder or a model folder")


def loss_is_no_number(loss: float, step: int, last: Path | None) -> TrainingError:
    kept = f"{last.name} is kept" if last is not None else "there was no checkpoint yet"
    return TrainingError(
        f"train: the loss is {loss} at step {step}; {kept}; try a smaller learning rate or more warm-up"
    )


def idle_far_fields(layers: Sequence[Any]) -> str:
    shown = ", ".join(layer.words for layer in layers)
    return (
        f"train: the far field of {len(layers)} layers contributes nothing on held-out sequences: {shown}. Either "
        "nothing far away tells about these data, and `window` does as well for less; or the model has not learned to "
        "look there yet: more steps, longer windows, more features"
    )


def useless_features(layers: Sequence[Any], step: int) -> str:
    shown = ", ".join(f"{layer.name} ({layer.error:.2f}, the mean {layer.uniform:.2f})" for layer in layers)
    return (
        f"train: at step {step} the features of {len(layers)} layers do about as badly as the mean of all values, "
        f"by their error against exact attention on held-out sequences: {shown}. `subquad diagnose` tells more, head "
        "by head; `subquad.calibrate` fits features to the model; or give these layers exact attention (softmax)"
    )
