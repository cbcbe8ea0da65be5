"""Hugging Face datasets by name, where a hub or a local copy can be reached."""

from collections.abc import Iterator

from subquad.checks import data as checks

PREFIX = "hf:"


def is_hub_name(source: str) -> bool:
    return source.startswith(PREFIX)


def hub_texts(source: str) -> Iterator[str]:
    """The texts of `hf:NAME`, `hf:NAME:COLUMN` or `hf:FOLDER`: the training split, streamed."""
    with checks.hub(source):
        from datasets import load_dataset

        name, _, column = source.removeprefix(PREFIX).partition(":")
        rows = load_dataset(name, split="train", streaming=True)
        first = next(iter(rows))
    column = checks.text_column(source, first, column)
    return (row[column] for row in rows)
