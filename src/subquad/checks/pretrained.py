"""Checks of what models of transformers are given on the command line: names, tokenizers, texts."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subquad.checks.data import asks_for_code
from subquad.errors import CheckpointError, ConfigError, DataError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")


def looks_like_hub_name(path: Path) -> bool:
    """`owner/name`, where there is no such folder."""
    return not path.exists() and HUB_NAME.fullmatch(str(path)) is not None


@contextmanager
def from_the_hub(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no network, no such name, no permission, no room
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{name}: there is no such folder, and no model of this name could be had from the hub ({reason}); give a "
            "run folder, a model folder, or download the model first"
        ) from error


def tokenizer_there(folder: Path) -> None:
    if not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: holds no tokenizer (tokenizer.json or the like); save the one of the model beside it"
        )


@contextmanager
def tokenizer(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file, or one that takes a package that is not installed
        if asks_for_code(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded ({reason})") from error


def first_token(folder: Path, candidates: Sequence[int | None]) -> int:
    """The first of these tokens that there is."""
    found = next((token for token in candidates if token is not None), None)
    if found is None:
        raise ConfigError(
            f"{folder}: its tokenizer puts nothing in front of a text and has neither a start nor an end token, so "
            "nothing says how a text begins; name one in its tokenizer_config.json (bos_token), or give a --prompt to "
            "generate"
        )
    return found


def mask_token(folder: Path, token: int | None) -> int:
    if token is None:
        raise ConfigError(
            f"{folder}: its tokenizer has no mask token, so no token can be hidden; name it in its "
            "tokenizer_config.json (mask_token)"
        )
    return token


def known_tokens(name: str, ids: Sequence[int], known: int) -> None:
    """Another tokenizer than that of the model may have more tokens."""
    if max(ids, default=0) >= known:
        raise CheckpointError(
            f"{name} becomes token {max(ids)}, but the model knows {known} tokens only; its tokenizer is of another "
            "model"
        )


def known_residue(name: str, sequence: str, vocabulary: Any) -> None:
    for position, letter in enumerate(sequence, 1):
        if letter not in vocabulary:
            raise DataError(
                f"{name}: {letter!r} at position {position} is no token of the model; replace it, by X if the model "
                "has one"
            )


def some_tokens(name: str, ids: Sequence[int]) -> None:
    if not ids:
        raise DataError(f"{name}: holds no text")


def sequence_fits(name: str, tokens: int, limit: int | None) -> None:
    """Beyond its positions a model fails, or has never seen such; windows would be other numbers than asked for."""
    if limit is not None and tokens > limit:
        raise DataError(
            f"{name}: has {tokens} tokens with special ones, but the model takes at most {limit}; cut it into shorter "
            "ones"
        )


def new_tokens_fit(length: int | None, usual: int, prompt: int, limit: int | None) -> int:
    """How many to generate after a prompt of so many tokens."""
    if limit is None:
        return usual if length is None else length
    room = limit - prompt
    if room < 1:
        raise ConfigError(f"--prompt: has {prompt} tokens with special ones, but the model takes at most {limit}")
    if length is not None and length > room:
        raise ConfigError(
            f"--length: the model takes at most {limit} tokens, and the prompt has {prompt}; give at most {room}"
        )
    return min(usual, room) if length is None else length
