"""Checks of `mixed`: a list of parts, which share the key heads of a layer among them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.checks import guess, option_names
from subquad.errors import ConfigError, ShapeError

OP = "mixed"
EXAMPLE = "[{'attention': 'favor', 'heads': [0, 2], 'num_features': 64}, {'attention': 'softmax', 'heads': [1]}]"


def parts(given: Any, known: Sequence[str]) -> list[dict[str, Any]]:
    """One dict for each part, with a known mechanism, and heads that are 0, 1, ... together, each once."""
    if given is None:
        raise ConfigError(
            f"{OP}: needs parts, which say what each key head has, such as parts={EXAMPLE}; "
            "on the command line --option 'parts=...', in JSON"
        )
    is_list = isinstance(given, (list, tuple)) and all(isinstance(part, dict) for part in given)
    if not is_list or not given:
        raise ConfigError(f"{OP}: parts must be a list with a dict for each part, such as {EXAMPLE}, got {given!r}")
    for number, part in enumerate(given):
        _mechanism(number, part.get("attention"), known)
        _heads(number, part)
    _each_once([part["heads"] for part in given])
    return [dict(part) for part in given]


def _mechanism(number: int, name: Any, known: Sequence[str]) -> None:
    if name is None:
        raise ConfigError(f"{OP}: part {number} has no 'attention', the name of its mechanism; known: {_names(known)}")
    if name == OP:
        raise ConfigError(f"{OP}: part {number} is mixed itself; put its parts beside the others")
    if name not in known:
        raise ConfigError(
            f"{OP}: part {number} has the unknown attention {name!r}{guess(name, known)}; known: {_names(known)}"
        )


def _names(known: Sequence[str]) -> str:
    return ", ".join(known)


def _heads(number: int, part: dict[str, Any]) -> None:
    where, heads = f"{OP}: part {number} ({part['attention']})", part.get("heads")
    if heads is None:
        raise ConfigError(f"{where} has no 'heads', the list of its key heads")
    whole = isinstance(heads, (list, tuple)) and all(type(head) is int and head >= 0 for head in heads)
    if not whole or not heads:
        raise ConfigError(f"{where} must have a list of key heads, whole numbers from 0 on, got heads={heads!r}")


def _each_once(heads: Sequence[Sequence[int]]) -> None:
    every = sorted(head for part in heads for head in part)
    for place, head in enumerate(every):
        if head != place:
            wrong = f"head {head} is there twice" if head < place else f"head {place} is missing"
            raise ConfigError(f"{OP}: all parts together must have the key heads 0, 1, ..., each once; {wrong}")


def part_options(number: int, name: str, given: Sequence[str], known: Sequence[str]) -> None:
    option_names(f"{OP}: part {number} ({name})", given, known)


def heads_of_layer(parts: int, layer: int) -> None:
    if parts != layer:
        raise ConfigError(f"{OP}: its parts have {parts} key heads, the layer has {layer}; each must be in one part")


def key_heads(made_for: int, k: Tensor) -> None:
    if k.shape[1] != made_for:
        raise ShapeError(f"{OP}: made for {made_for} key heads, got k with {k.shape[1]}")


# Errors to raise ------------------------------------------------------------------------------------------------------


def other_state(wanted: str, got: str) -> ShapeError:
    return ShapeError(f"{OP}: state must be one that extend returned for {wanted}, got {got}")
