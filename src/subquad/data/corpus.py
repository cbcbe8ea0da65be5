"""Many sequences in one array on disk, and how they are split."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from subquad.checks import data as checks
from subquad.data.vocabulary import Vocabulary

FEW = 20  # with fewer sequences than this, the end of each is held out instead of whole ones


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids without separators: sequence i is `tokens[starts[i] : ends[i]]`.

    `tokens` is mapped from a file that vanishes with it, so that a corpus needs little memory.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    keys: np.ndarray  # a hash of each sequence's content
    vocabulary: Vocabulary
    domain: str
    image_shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.ends[index]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Changes whenever a sequence, or their order, does."""
        digest = hashlib.blake2b(self.keys.tobytes() + self.lengths.tobytes(), digest_size=16)
        return digest.hexdigest()

    def select(self, chosen: np.ndarray) -> "Corpus":
        return replace(self, starts=self.starts[chosen], ends=self.ends[chosen], keys=self.keys[chosen])

    def split(self, fraction: float) -> tuple["Corpus", "Corpus"]:
        """Training and validation parts that share no sequence, nor copies of one: the content decides the side.

        With few sequences (one long text) the last `fraction` of each is held out instead.
        """
        checks.split_fraction(fraction)
        if len(self) < FEW and self.domain != "image":
            cut = self.ends - np.maximum(1, (self.lengths * fraction).astype(np.int64))
            train, held_out = replace(self, ends=cut), replace(self, starts=cut)
            train = train.select(train.lengths > 0)
            checks.both_sides(len(train), len(held_out))
            return train, held_out
        held_out = self.keys < np.uint64(int(fraction * 2**64))
        if not held_out.any():
            held_out = self.keys == self.keys.min()
        checks.both_sides(int((~held_out).sum()), int(held_out.sum()))
        return self.select(~held_out), self.select(held_out)


class CorpusWriter:
    """Collects sequences piece by piece; only their lengths and hashes stay in memory.

    Example:
        >>> from subquad.data.vocabulary import BYTES
        >>> with CorpusWriter(BYTES, "text") as writer:
        ...     writer.add(np.array([4, 5], np.uint8))
        ...     writer.add(np.array([6], np.uint8))
        ...     corpus = writer.finish()
        >>> [sequence.tolist() for sequence in corpus]
        [[4, 5], [6]]
    """

    def __init__(self, vocabulary: Vocabulary, domain: str, image_shape: tuple[int, ...] | None = None) -> None:
        self.vocabulary, self.domain, self.image_shape = vocabulary, domain, image_shape
        with checks.room_for_tokens():
            self.file = tempfile.TemporaryFile(prefix="subquad-corpus-")  # noqa: SIM115, closed by __exit__
        self.lengths: list[int] = []
        self.keys: list[int] = []
        self._begin()

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # `finish` raises what could not be written
            self.file.close()  # a corpus made from it keeps its map

    def _begin(self) -> None:
        self._length, self._hash = 0, hashlib.blake2b(digest_size=8)

    def extend(self, ids: np.ndarray) -> None:
        """More of the sequence at hand."""
        piece = ids.astype(self.vocabulary.dtype, copy=False).tobytes()
        with checks.room_for_tokens():
            self.file.write(piece)
        self._hash.update(piece)
        self._length += len(ids)

    def end(self) -> None:
        """The sequence at hand is complete; an empty one is dropped."""
        if self._length:
            self.lengths.append(self._length)
            self.keys.append(int.from_bytes(self._hash.digest(), "little"))
        self._begin()

    def add(self, ids: np.ndarray) -> None:
        self.extend(ids)
        self.end()

    def finish(self) -> Corpus:
        with checks.room_for_tokens():
            self.file.flush()
        ends = np.cumsum(np.array(self.lengths, np.int64))
        total = int(ends[-1]) if len(ends) else 0
        dtype = self.vocabulary.dtype
        tokens = np.memmap(self.file, dtype, "r", shape=(total,)) if total else np.zeros(0, dtype)
        keys = np.array(self.keys, np.uint64)
        starts = ends - np.array(self.lengths, np.int64)
        return Corpus(tokens, starts, ends, keys, self.vocabulary, self.domain, self.image_shape)
