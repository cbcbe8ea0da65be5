"""Hugging Face datasets by name, where a hub or a local copy can be reached."""

from collections.abc import Iterator
from typing import Any

from subquad.checks import data as checks

PREFIX = "hf:"


def is_hub_name(source: str) -> bool:
    return source.startswith(PREFIX)


def hub_texts(source: str) -> Iterator[str]:
    """The texts of `hf:NAME`, `hf:NAME:COLUMN` or `hf:FOLDER`: the training split, streamed."""
    with checks.hub(source):
        from datasets import load_dataset

        name, _, column = source.removeprefix(PREFIX).partition(":")
        rows = load_dataset(name, split="train", streaming=True, trust_remote_code=False)
        first = next(iter(rows))
    return _texts(source, rows, checks.text_column(source, first, column))


def _texts(source: str, rows: Any, column: str) -> Iterator[str]:
    with checks.hub(source):
        for row in rows:
            if row[column]:  # rows without text are left out
                yield row[column]
