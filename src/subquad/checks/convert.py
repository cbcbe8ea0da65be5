"""Checks of `subquad.convert`."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.checks import choice, count
from subquad.checks import seed as seed_number
from subquad.checks.recording import batches as recorded_batches
from subquad.errors import CalibrationError, CheckpointError, ConfigError

BUDGET = re.compile(r"(exact|cache|loss) (\d+(?:\.\d*)?) ?%")
BUDGETS = "'constant', 'exact 10%' (of the key heads), 'cache 20%' (of the memory) or 'loss 1%' (of perplexity)"


def budget(given: Any) -> tuple[str, float]:
    """What is budgeted, and the share of it."""
    words = given.strip() if isinstance(given, str) else ""
    if words == "constant":
        return words, 0.0
    found = BUDGET.fullmatch(words)
    share = float(found[2]) / 100 if found else math.nan
    if found is None or not share > 0 or (found[1] != "loss" and share > 1):
        raise ConfigError(f"convert: budget must be {BUDGETS}, got {given!r}")
    return found[1], share


def sizes(window: Any, step: int, sinks: Any, num_features: Any, steps: Any, seed: Any) -> None:
    """step: of the window."""
    if count("convert", "window", window, minimum=0) % step:
        raise ConfigError(f"convert: window must be a multiple of {step}, or 0 for none, got {window}")
    count("convert", "sinks", sinks, minimum=0)
    if count("convert", "num_features", num_features) % 2:
        raise ConfigError(f"convert: num_features must be even, got {num_features}")
    count("convert", "steps", steps)
    seed_number("convert", seed)


def weight(given: Any) -> float:
    """Of copying."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise ConfigError(f"convert: copying must be a number of at least 0, got {given!r}")
    return float(given)


def kinds(given: Any, possible: Sequence[str], budget: str) -> tuple[str, ...]:
    if given is None:
        return tuple(possible)
    if isinstance(given, str) or not isinstance(given, Iterable) or not (some := list(given)):
        raise ConfigError(f"convert: kinds must be a list of {', '.join(possible)}, got {given!r}")
    for kind in some:
        choice(f"convert: with budget {budget!r}", "every kind", kind, possible)
    return tuple(kind for kind in possible if kind in some)


def kinds_of_direction(kinds: Sequence[str], causal: bool, of_memory: bool) -> tuple[str, ...]:
    """What looks both ways has no state, so that nothing of memory can be budgeted, and no pages of the past."""
    if causal:
        return tuple(kinds)
    if of_memory:
        raise ConfigError(
            "convert: a budget of cache or loss is about the memory of a causal model, and this one looks both ways; "
            "use 'constant' or 'exact 10%'"
        )
    return tuple(kind for kind in kinds if kind != "pages")


def one_direction(model: Any, causal: Sequence[bool]) -> None:
    if len(set(causal)) != 1:
        raise ConfigError(f"convert: some layers of {type(model).__name__} are causal and others are not")


def batches(given: Any) -> list[Any]:
    return recorded_batches("convert", given)


@contextmanager
def folder_usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"convert: nothing can be kept in {folder} ({error.strerror or error})") from error


@contextmanager
def kept_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # safetensors has an error of its own for each kind of damage
        raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged ({why}); remove it, and what it held is made again")


def same_digest(path: Path, kept: Any, now: str) -> None:
    if kept != now:
        raise damaged(path, "its numbers are not those that were written")


def same_conversion(folder: Path, kept: Any, now: Any) -> None:
    if kept != now:
        raise ConfigError(
            f"convert: {folder} holds a conversion of another model, with other batches or other options; give the "
            "same again, or another folder"
        )


def no_choice(budget: str, kinds: Iterable[str], share: float) -> ConfigError:
    """share: of what is budgeted, taken by the cheapest candidates of all heads."""
    return ConfigError(
        f"convert: no choice of kinds ({', '.join(kinds)}) keeps the budget {budget!r}: the least there is takes "
        f"{100 * share:.1f} %; allow more, or a smaller window or fewer features"
    )


def all_recorded(names: Sequence[str], recorded: Mapping[str, Any]) -> None:
    """An attention layer that no batch went through has nothing to be fitted to."""
    missing = [name for name in names if name not in recorded]
    if missing:
        raise ConfigError(f"convert: no batch went through {', '.join(missing)}; give batches that use every layer")


def gradient_begins(model: Any, output: Any) -> None:
    if output is None or not output.requires_grad:
        raise ConfigError(
            f"convert: no gradient of {type(model).__name__} reaches its attention; give batches of token ids or "
            "pictures (not of embeddings)"
        )


def words_or_states(model: Any, logits: Any, hidden: Any) -> None:
    """What the cost of errors is measured by: logits over words or classes, or hidden states."""
    if logits is None and hidden is None:
        raise ConfigError(
            f"convert: {type(model).__name__} gives neither logits nor last_hidden_state, so nothing tells what its "
            "errors cost; convert the model inside it"
        )
    if logits is not None and (logits.dim() < 2 or logits.shape[-1] < 2):
        raise ConfigError(
            f"convert: the logits of {type(model).__name__} {list(logits.shape)} do not choose between words or "
            "classes; convert the model inside it"
        )


def predictions(model: Any, rows: Tensor) -> None:
    if not bool(rows.isfinite().all()):
        raise CalibrationError(f"convert: the logits of {type(model).__name__} are not finite; load it in float32")


def useful_gradients(model: Any, found: Mapping[str, Tensor]) -> None:
    for layer, information in found.items():
        if not bool(information.isfinite().all()):
            raise CalibrationError(
                f"convert: gradients at {layer} of {type(model).__name__} are not finite; load it in float32"
            )
    if not any(bool(information.any()) for information in found.values()):
        raise ConfigError(
            f"convert: no error of the attention of {type(model).__name__} changes what it predicts for the first "
            "tokens of these batches; give batches of real tokens"
        )


def some_heads(budget: str, heads: int, most: int) -> None:
    if not most:
        raise ConfigError(f"convert: budget {budget!r} of {heads} key heads is none; use 'constant', or a larger share")


def some_candidates(found: Sequence[Any], window: int) -> None:
    if not found:
        why = "pages are of the past, and this model looks both ways" if window else "window=0 leaves no windows"
        raise ConfigError(f"convert: nothing is left of kinds, as {why}; allow others")


def finite_prices(layer: str, prices: Mapping[str, Any]) -> None:
    for candidate, price in prices.items():
        if not bool(price.nats.isfinite().all()):
            raise CalibrationError(
                f"convert: {layer}: what {candidate!r} costs is not a finite number; give batches with real tokens, or "
                "load the model in float32"
            )


def like_the_layers(model: Any, sizes: Mapping[str, tuple[int, int]], recorded: Mapping[str, tuple[int, int]]) -> None:
    """Head dim and key heads of each module, and of the calls that were recorded."""
    for name, size in recorded.items():
        if sizes[name] != size:
            raise ConfigError(
                f"convert: {name} of {type(model).__name__} says it has (head_dim, key heads) = {sizes[name]}, but "
                f"its calls have {size}"
            )
