"""Images as sequences of pixels: idx files (MNIST), npz, or a folder of PNG."""

import gzip
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from subquad.checks import data as checks
from subquad.data.corpus import Corpus, CorpusWriter
from subquad.data.vocabulary import SPECIALS, pixels


def load_images(path: str | Path, *, levels: int = 256) -> Corpus:
    """One sequence per image, row by row, channels of a pixel together; values reduced to `levels`."""
    return images_corpus(read_images(Path(path)), levels=levels, of=256)


def images_corpus(images: np.ndarray, *, levels: int = 256, of: int | None = None) -> Corpus:
    """images `[N, H, W]` or `[N, H, W, C]` of whole numbers below `of` (default: `levels`).

    Example:
        >>> images_corpus(np.array([[[0, 3], [1, 2]]]), levels=4)[0].tolist()
        [4, 7, 5, 6]
    """
    of = levels if of is None else of
    checks.image_array(images, levels, of)
    shape = tuple(images.shape[1:])
    with CorpusWriter(pixels(levels), "image", shape) as writer:
        for image in images:
            writer.add((image.reshape(-1).astype(np.int64) * levels // of + len(SPECIALS)).astype(np.uint16))
        return writer.finish()


def read_images(path: Path) -> np.ndarray:
    """uint8 `[N, H, W]` or `[N, H, W, C]`."""
    if path.is_dir():
        return _read_folder(path)
    checks.readable_file(path)
    with checks.decodable(path), checks.readable(path):
        if path.suffix == ".npz":
            return _read_npz(path)
        return _read_idx(path)


def _read_idx(path: Path) -> np.ndarray:
    """MNIST's format: 0, 0, type (8 = bytes), dimensions, their sizes, data."""
    with path.open("rb") as file:
        head = file.read(2)
    with gzip.open(path) if head == b"\x1f\x8b" else path.open("rb") as file:
        magic = file.read(4)
        checks.idx_header(path, magic)
        sizes = struct.unpack(f">{magic[3]}I", file.read(4 * magic[3]))
        data = np.frombuffer(_read_at_most(file, math.prod(sizes) + 1), np.uint8)
    checks.idx_size(path, sizes, data.size)
    return data.reshape(sizes)


def _read_at_most(file: Any, size: int) -> bytes:
    """A packed file may go on for ever, and a header may claim any size."""
    pieces = []
    while size and (piece := file.read(min(size, 1 << 20))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _read_npz(path: Path) -> np.ndarray:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = {name: arrays[name] for name in arrays.files if arrays[name].ndim in (3, 4)}
    checks.one_image_array(path, list(images))
    return images["images"] if "images" in images else next(iter(images.values()))


def _opened(file: Path) -> Any:
    """A picture whose pixels are not read yet. PIL only warns of a size that we refuse."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(file)


def _read_folder(path: Path) -> np.ndarray:
    files = sorted(path.rglob("*.png"))
    checks.some_files(files, [path], kind="PNG image")
    images = []
    for file in files:
        with checks.decodable(file), checks.readable(file), _opened(file) as image:
            checks.picture_size(file, *image.size)
            checks.eight_bit(file, image.mode)
            images.append(np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB")))
        checks.same_size(file, images[-1].shape, files[0], images[0].shape)
    return np.stack(images)
