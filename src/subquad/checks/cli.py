"""Checks of the command line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from subquad.checks import seed as checked_seed
from subquad.checks.data import asks_for_code
from subquad.checks.runs import no_pickled_code
from subquad.errors import CheckpointError, ConfigError, DataError, SubquadError


@contextmanager
def loadable(folder: Path) -> Iterator[None]:
    try:
        with no_pickled_code(folder):
            yield
    except SubquadError:
        raise
    except Exception as error:  # a damaged folder has many ways to fail
        if asks_for_code(error):
            raise CheckpointError(
                f"{folder}: asks to run Python code that comes with it, which subquad never does; if you trust it, "
                "load the model in Python with trust_remote_code=True and use subquad.diagnose, subquad.calibrate or "
                "subquad.diagnostics.spectrum there"
            ) from error
        raise CheckpointError(f"{folder}: no model can be loaded from it ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def converted_model(path: Path, converted: bool) -> None:
    if not converted:
        raise ConfigError(f"bill: {path} is no converted model; make one of it with subquad convert")


def long_enough(count: int, paths: list[Path], length: int) -> None:
    if not count:
        raise DataError(
            f"{', '.join(map(str, paths))}: holds no stretch of {length} tokens; give longer texts, or a "
            "smaller --length"
        )


def subquad_model(folder: Path, config: Any) -> None:
    if config.domain not in ("protein", "text", "image"):
        raise CheckpointError(f"{folder}: does not say whether it is for protein, text or image; set config.domain")
    if not isinstance(config.bos_token_id, int) or not 0 <= config.bos_token_id < config.vocab_size:
        raise CheckpointError(
            f"{folder}: bos_token_id must lie in the vocabulary of {config.vocab_size}, got {config.bos_token_id}"
        )


UNUSED = ("pooler.", "seq_relationship.")  # parts of BERT that many folders hold beside a model without them


def whole_model(folder: Path, report: Any, allowed: tuple[str, ...]) -> None:
    """Weights that are missing would be random, weights left over mean another model. allowed: parts of their names."""
    missing = sorted(report["missing_keys"])
    left_over = sorted(key for key in report["unexpected_keys"] if not any(part in key for part in allowed))
    if missing or left_over or report["mismatched_keys"]:
        wrong = [*missing, *left_over, *map(str, report["mismatched_keys"])]
        raise CheckpointError(f"{folder}: the weights are not those of the config ({', '.join(wrong[:3])} ...)")


def image_shape(path: Path, shape: Any, wanted: Any) -> None:
    if wanted is not None and list(shape) != list(wanted):
        raise DataError(f"{path}: images are {list(shape)}, the model is for {list(wanted)}")


def utf8_prompt(prompt: str) -> bytes:
    try:
        return prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt: is not valid text (UTF-8)") from error


def byte_model(vocab_size: int, byte_size: int) -> None:
    if vocab_size != byte_size:
        raise CheckpointError(
            "the checkpoint was trained with a tokenizer that is saved when the run ends; finish the run"
        )


def output_suffix(path: Path, allowed: tuple[str, ...]) -> None:
    if path.suffix not in allowed:
        raise ConfigError(f"--output: must end in {' or '.join(allowed)}, got {path.name!r}")


@contextmanager
def output_file(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"--output {path}: cannot be written ({error.strerror or error})") from error


def output_folder(path: Path) -> None:
    """Complains before hours of work, not after."""
    if not path.parent.is_dir():
        raise DataError(f"--output {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise DataError(f"--output {path}: is a folder")


def causal_model(path: Path, causal: bool) -> None:
    if not causal:
        raise ConfigError(f"{path}: is a masked model, which cannot generate; train with --objective causal")


def sampling(temperature: float, top_k: int, top_p: float) -> None:
    if not 0.01 <= temperature <= 100:
        raise ConfigError(
            f"--temperature: must lie between 0.01 and 100, got {temperature}; --greedy takes the likeliest token"
        )
    if top_k < 0:
        raise ConfigError(f"--top-k: must be at least 0 (off), got {top_k}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: must lie above 0 and at most at 1, got {top_p}")


def option_pairs(pairs: list[str]) -> dict[str, Any]:
    """`name=value` options of a mechanism; values are whole numbers, numbers, or words."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"--option: must be NAME=VALUE such as num_features=128, got {pair!r}")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    """3, 0.5 and null as JSON reads them; a word otherwise."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def something_to_read(count: int, paths: list[Path]) -> None:
    if not count:
        raise DataError(f"{', '.join(map(str, paths))}: holds no sequence")


def length_fits(length: int, limit: int | None) -> None:
    """Models with learned positions fail beyond theirs, others have never seen such."""
    if limit is not None and length > limit:
        raise ConfigError(f"--length: the model takes at most {limit} tokens, got {length}")


def feature_count(text: str | None) -> "int | Literal['auto'] | None":
    """Of `subquad calibrate`."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--features: must be a whole number of at least 1, or auto, got {text!r}")
    return int(text)


def new_folder(path: Path) -> None:
    """Complains before the work, not after; what is there stays."""
    if path.exists() or path.is_symlink():
        raise DataError(f"--out {path}: exists already; give another name")


def json_file(path: Path) -> None:
    if path.suffix != ".json":
        raise ConfigError(f"--json: must end in .json, got {path.name!r}")
    if not path.parent.is_dir():
        raise DataError(f"--json {path}: there is no folder {path.parent}")


def no_prompt(prompt: str) -> None:
    if prompt:
        raise ConfigError("--prompt: image models take none, they begin at the first pixel")


def no_length(length: int | None) -> None:
    if length is not None:
        raise ConfigError("--length: an image has as many pixels as it has; leave it out")


def new_tokens(length: int) -> int:
    return count("--length", length)


def count(option: str, value: int, least: int = 1) -> int:
    if value < least:
        raise ConfigError(f"{option}: must be at least {least}, got {value}")
    return value


def generate_seed(seed: int) -> int:
    return checked_seed("--seed", seed)


def only_for_masked(exact: bool, passes: int | None, causal: bool) -> None:
    if causal and (exact or passes is not None):
        raise ConfigError("score: --exact and --passes are for masked models; this one is causal")
