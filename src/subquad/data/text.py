"""Text from files and folders: as bytes, or through any Hugging Face tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from subquad.checks import data as checks
from subquad.data.corpus import Corpus, CorpusWriter
from subquad.data.vocabulary import BYTES, SPECIALS, of_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 20  # bytes read, or characters tokenized, at once


def text_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files, and all files below folders, in a fixed order; hidden ones are left out."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.is_file())
            found += sorted(p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
        else:
            checks.readable_file(path)
            found.append(path)
    checks.some_files(found, paths)
    return found


def load_text(paths: Sequence[str | Path], tokenizer: "PreTrainedTokenizerBase | None" = None) -> Corpus:
    """One sequence per file; one token per byte unless a tokenizer is given."""
    writer = CorpusWriter(BYTES if tokenizer is None else of_tokenizer(tokenizer), "text")
    for path in text_files(paths):
        with checks.readable(path):
            if tokenizer is None:
                with path.open("rb") as file:
                    while piece := file.read(PIECE):
                        writer.extend(np.frombuffer(piece, np.uint8).astype(np.uint16) + len(SPECIALS))
            else:
                for lines in _pieces(path):
                    writer.extend(_encode(tokenizer, lines))
        writer.end()
    corpus = writer.finish()
    checks.not_empty(corpus.num_tokens, paths)
    return corpus


def texts_corpus(texts: Iterator[str], tokenizer: "PreTrainedTokenizerBase | None" = None) -> Corpus:
    """One sequence per text, wherever texts come from."""
    writer = CorpusWriter(BYTES if tokenizer is None else of_tokenizer(tokenizer), "text")
    for text in texts:
        if tokenizer is None:
            writer.add(np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + len(SPECIALS))
        else:
            writer.add(_encode(tokenizer, text))
    corpus = writer.finish()
    checks.not_empty(corpus.num_tokens, ["the texts"])
    return corpus


def _pieces(path: Path) -> Iterator[str]:
    """Whole lines, about a million characters at a time, so that a long file needs little memory."""
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(PIECE):
            yield "".join(lines)


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.uint32)
