"""Checks of files and of what is in them."""

import gzip
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from subquad.checks import choice, count, guess
from subquad.errors import ConfigError, DataError, SubquadError

MOST_PIXELS = 1 << 26


def readable_file(path: Path) -> None:
    if not path.exists():
        folder = path.parent
        names = {p.stem: p.name for p in folder.iterdir()} if folder.is_dir() else {}
        near = guess(path.stem, list(names))
        raise DataError(
            f"{path}: no such file" + (near and guess(path.name, [names[s] for s in names if repr(s) in near]))
        )
    if path.is_dir():
        raise DataError(f"{path}: is a folder, a file is needed")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: may not be read, check its permissions")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Damaged files are user errors."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: compressed data is damaged ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8, or train on bytes"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, struct.error) as error:
        if isinstance(error, SubquadError):
            raise
        raise DataError(f"{path}: cannot be read ({error})") from error


@contextmanager
def decodable(path: Path) -> Iterator[None]:
    """Decoders of pictures and arrays have many ways to fail on a damaged file."""
    try:
        yield
    except (SubquadError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({str(error).strip() or type(error).__name__})") from error


def picture_size(path: Path, width: int, height: int) -> None:
    """A few bytes can claim to be billions of pixels."""
    if width * height > MOST_PIXELS:
        raise DataError(f"{path}: claims to be {width:,} x {height:,} pixels; at most {MOST_PIXELS:,} are read")


@contextmanager
def room_for_tokens() -> Iterator[None]:
    """Tokens are kept in a temporary file while they are in use."""
    try:
        yield
    except OSError as error:
        folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
        raise DataError(
            f"{folder}: has no room for the data while they are in use ({error.strerror or error}); set TMPDIR to "
            "another folder"
        ) from error


def some_files(found: Sequence[Path], asked: Sequence[Any], kind: str = "file") -> None:
    if not found:
        raise DataError(f"{', '.join(map(str, asked)) or 'nothing given'}: there is no {kind} to read")


def not_empty(tokens: int, asked: Sequence[Any]) -> None:
    if not tokens:
        raise DataError(f"{', '.join(map(str, asked))}: holds no sequence")


def looks_like_fasta(path: Path, first: str) -> None:
    if not first:
        raise DataError(f"{path}: is empty; a FASTA file with at least one sequence is needed")
    if not first.startswith(">"):
        raise DataError(f"{path}: is not FASTA, its first line must begin with '>', got {first.strip()[:40]!r}")


def has_residues(path: Path, name: str, sequence: str) -> None:
    if not sequence.removesuffix("*"):
        raise DataError(f"{path}: {name} has no residues; remove the record")


def image_array(images: np.ndarray, levels: int, of: int) -> None:
    count("images", "levels", levels, minimum=2)
    if images.ndim not in (3, 4) or 0 in images.shape or not np.issubdtype(images.dtype, np.integer):
        raise DataError(
            f"images: must be whole numbers [N, H, W] or [N, H, W, C], got {images.dtype} {list(images.shape)}"
        )
    if images.min() < 0 or images.max() >= of:
        raise DataError(f"images: values must lie in 0..{of - 1}, got {images.min()}..{images.max()}")
    if levels > of:
        raise ConfigError(f"images: levels must be at most {of}, got {levels}")


def idx_header(path: Path, magic: bytes) -> None:
    if len(magic) < 4 or magic[:3] != b"\0\0\x08" or magic[3] not in (3, 4):
        raise DataError(
            f"{path}: holds no images; idx files of bytes with 3 or 4 dimensions, npz files and folders of PNG do"
        )


def idx_size(path: Path, sizes: Sequence[int], found: int) -> None:
    if math.prod(sizes) != found:
        raise DataError(f"{path}: should hold {list(sizes)} bytes, got {found}; the file is damaged")


def one_image_array(path: Path, names: Sequence[str]) -> None:
    if not names:
        raise DataError(f"{path}: has no array [N, H, W] or [N, H, W, C]")
    if len(names) > 1 and "images" not in names:
        raise DataError(f"{path}: has several arrays ({', '.join(names)}); call one of them 'images'")


def eight_bit(path: Path, mode: str) -> None:
    if mode.startswith(("I", "F")):
        raise DataError(f"{path}: has more than 8 bits per channel (mode {mode}); convert it to 8-bit PNG")


def same_size(path: Path, shape: Sequence[int], first: Path, first_shape: Sequence[int]) -> None:
    if tuple(shape) != tuple(first_shape):
        raise DataError(f"{path}: is {list(shape)}, but {first.name} is {list(first_shape)}; all images need one size")


@contextmanager
def hub(source: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(f"{source}: needs the package datasets; pip install datasets") from error
    except Exception as error:  # a hub has many ways to be out of reach
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{source}: cannot be loaded ({reason})") from error


def one_hub_name(sources: Sequence[str]) -> None:
    if len(sources) > 1:
        raise ConfigError(f"train text: give one hub dataset alone, got {' '.join(sources)}")


def asks_for_code(error: Exception) -> bool:
    """Whether transformers has refused to run the Python code of a folder or of the hub."""
    return "trust_remote_code" in str(error)


@contextmanager
def tokenizer(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # neither a folder, nor a name that a reachable hub knows
        if asks_for_code(error):
            raise DataError(
                f"--tokenizer {name}: asks to run Python code that comes with it, which subquad never does; if you "
                "trust it, load it in Python with trust_remote_code=True and give it to subquad.data.load_text"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"--tokenizer {name}: cannot be loaded ({reason})") from error


def text_column(source: str, row: dict[str, Any], column: str) -> str:
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if column and column not in texts:
        raise DataError(f"{source}: no text column {column!r}{guess(column, texts)}; columns: {', '.join(texts)}")
    if not column and len(texts) != 1:
        raise DataError(f"{source}: say which column, {source}:COLUMN; text columns: {', '.join(texts) or 'none'}")
    return column or texts[0]


# Samples --------------------------------------------------------------------------------------------------------------


def split_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(f"validation: the share must lie between 0 and 1, got {fraction}")


def both_sides(train: int, held_out: int) -> None:
    if not train or not held_out:
        raise DataError(
            f"validation: the data cannot be split, {train} sequences to train on and {held_out} held out; "
            "there is too little of it, or all sequences are copies of one"
        )


def objective(name: str, mask: int | None) -> None:
    choice("samples", "objective", name, ("causal", "masked"))
    if name == "masked" and mask is None:
        raise ConfigError("samples: the tokenizer has no mask token, which objective 'masked' needs; use 'causal'")


def window_fits(length: int, tokens: int) -> None:
    count("samples", "window", length, minimum=2)
    if length > tokens:
        raise DataError(
            f"samples: a window of {length:,} tokens is longer than the data, {tokens:,} with separators; "
            "use a shorter window or more data"
        )


def held_out_window_fits(length: int, tokens: int, share: float) -> None:
    if length > tokens:
        raise DataError(
            f"samples: a window of {length:,} tokens is longer than the held-out data, {tokens:,} with separators; "
            f"use a shorter window, or hold out a larger share than {share}"
        )


def crop_length(length: int) -> None:
    count("samples", "window", length, minimum=2)


def separator(sep: int | None, name: str) -> int:
    if sep is None:
        raise ConfigError(f"{name}: the tokenizer has no token to separate documents (eos, sep or bos)")
    return sep


# Errors to raise ------------------------------------------------------------------------------------------------------


def not_a_residue(name: str, letter: str, position: int) -> DataError:
    return DataError(
        f"{name}: {letter!r} at position {position} is no amino acid; "
        "allowed are the 20, X B Z U O J, '-' for a gap and a final '*'"
    )
