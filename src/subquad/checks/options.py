"""Options of mechanisms, layers and commands: numbers, names, and what a mechanism cannot do."""

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from subquad.errors import ConfigError


def count(op: str, name: str, value: Any, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{op}: {name} must be a whole number of at least {minimum}, got {value!r}")
    return value


def optional_count(op: str, name: str, value: Any, minimum: int = 1) -> int | None:
    return None if value is None else count(op, name, value, minimum)


def seed(op: str, value: Any) -> int:
    if count(op, "seed", value, minimum=0) >= 2**32:
        raise ConfigError(f"{op}: seed must be below 2**32, got {value}")
    return value


def scale(op: str, value: Any, head_dim: int) -> float:
    """The given scale, or 1/sqrt(head_dim)."""
    if value is None:
        return head_dim**-0.5
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{op}: scale must be a positive finite number, got {value!r}")
    return float(value)


def probability(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{op}: {name} must be at least 0 and below 1, got {value!r}")
    return float(value)


def share(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:  # nor NaN
        raise ConfigError(f"{op}: {name} must be from 0 (nothing) to 1 (all), got {value!r}")
    return float(value)


def choice(op: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{op}: {name} must be one of {', '.join(choices)}, got {value!r}{guess(value, choices)}")


def mechanism_name(name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"unknown attention {name!r}{guess(name, known)}; known: {', '.join(known)}")


def option_names(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    for option in given:
        if option not in known:
            raise ConfigError(f"{name}: unknown option {option!r}{guess(option, known)}; options: {', '.join(known)}")


def guess(value: Any, known: Sequence[str]) -> str:
    longer = [name for name in known if name.startswith(str(value))]
    near = longer or difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def needs(package: str, option: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{option}: needs the package {package}; pip install {package}") from error


# Errors to raise ------------------------------------------------------------------------------------------------------


def cannot_be_causal(op: str, why: str) -> ConfigError:
    return ConfigError(f"{op}: cannot be causal, {why}; use causal=False")


def only_causal(op: str, why: str) -> ConfigError:
    return ConfigError(f"{op}: can only be causal, {why}; use causal=True")


def cannot_extend(op: str) -> ConfigError:
    return ConfigError(f"{op}: cannot extend a sequence, it has no state; use forward on the whole")


def cannot_join(op: str, has_state: bool) -> ConfigError:
    if not has_state:
        return ConfigError(f"{op}: cannot join states, it has none; use forward on the whole")
    return ConfigError(
        f"{op}: cannot join states, they grow with the length and the mechanism has no join_states of its own; write "
        "one, or give every sequence a state of its own"
    )
