"""Text from files and folders: as bytes, or through any Hugging Face tokenizer."""

from collections.abc import Iterable, Iterator, Sequence
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
    with CorpusWriter(BYTES if tokenizer is None else of_tokenizer(tokenizer), "text") as writer:
        for path in text_files(paths):
            with checks.readable(path):
                for ids in _bytes_of(path) if tokenizer is None else _tokens_of(path, tokenizer):
                    writer.extend(ids)
            writer.end()
        corpus = writer.finish()
    checks.not_empty(corpus.num_tokens, paths)
    return corpus


def texts_corpus(texts: Iterable[str], tokenizer: "PreTrainedTokenizerBase | None" = None) -> Corpus:
    """One sequence per text, wherever texts come from."""
    with CorpusWriter(BYTES if tokenizer is None else of_tokenizer(tokenizer), "text") as writer:
        for text in texts:
            writer.add(_of_bytes(text.encode()) if tokenizer is None else _encode(tokenizer, text))
        corpus = writer.finish()
    checks.not_empty(corpus.num_tokens, ["the texts"])
    return corpus


def _bytes_of(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield _of_bytes(piece)


def _of_bytes(piece: bytes) -> np.ndarray:
    return np.frombuffer(piece, np.uint8).astype(np.uint16) + len(SPECIALS)


def _tokens_of(path: Path, tokenizer: "PreTrainedTokenizerBase") -> Iterator[np.ndarray]:
    """Whole lines, about a million characters at a time, so that a long file needs little memory."""
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(PIECE):
            yield _encode(tokenizer, "".join(lines))


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.uint32)
