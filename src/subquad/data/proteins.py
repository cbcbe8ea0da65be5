"""Protein sequences from FASTA files, plain or compressed."""

import gzip
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from subquad.checks import data as checks
from subquad.data.corpus import Corpus, CorpusWriter
from subquad.data.vocabulary import AMBIGUOUS, AMINO_ACIDS, GAP, PROTEIN, SPECIALS

SAMPLE = files("subquad.data") / "sample" / "uniprot.fasta.gz"
UNKNOWN = 255


def _table() -> np.ndarray:
    table = np.full(256, UNKNOWN, np.uint8)
    for i, letter in enumerate(AMINO_ACIDS + AMBIGUOUS + GAP):
        table[ord(letter)] = table[ord(letter.lower())] = len(SPECIALS) + i
    return table


TABLE = _table()


def encode(sequence: str, name: str = "sequence") -> np.ndarray:
    """Token ids of the residues; a final `*` (stop) is dropped, a letter that is no residue raises.

    Example:
        >>> encode("MKv").tolist()
        [14, 12, 21]
    """
    letters = sequence.removesuffix("*").encode("latin-1", errors="replace")
    ids = TABLE[np.frombuffer(letters, np.uint8)]
    if (ids == UNKNOWN).any():
        position = int((ids == UNKNOWN).argmax())
        raise checks.not_a_residue(name, sequence[position], position + 1)
    return ids


def open_text(path: Path) -> TextIO:
    """A text file, unpacked if its first bytes say gzip."""
    checks.readable_file(path)
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    how: Any = {"encoding": "utf-8-sig", "errors": "replace"}  # what editors of other systems put in front is dropped
    return gzip.open(path, "rt", **how) if compressed else path.open(**how)


def read_fasta(path: str | Path) -> Iterator[tuple[str, str]]:
    """(name, sequence) of each record, one at a time."""
    from Bio.SeqIO.FastaIO import SimpleFastaParser

    path = Path(path)
    with checks.readable(path), open_text(path) as file:
        first = next((line for line in file if line.strip()), "")
        checks.looks_like_fasta(path, first)
        file.seek(0)
        for title, sequence in SimpleFastaParser(file):
            name = title.split(maxsplit=1)[0] if title.strip() else "unnamed"
            checks.has_residues(path, name, sequence)
            yield name, sequence


def load_proteins(paths: Sequence[str | Path] = ()) -> Corpus:
    """All sequences of FASTA files; without any, the sample of UniProt that comes with subquad.

    Example:
        >>> corpus = load_proteins()
        >>> corpus.domain, len(corpus) > 1000
        ('protein', True)
    """
    with CorpusWriter(PROTEIN, "protein") as writer:
        for path in paths or [Path(str(SAMPLE))]:
            for name, sequence in read_fasta(path):
                writer.add(encode(sequence, f"{path}: {name}"))
        corpus = writer.finish()
    checks.not_empty(corpus.num_tokens, paths)
    return corpus
