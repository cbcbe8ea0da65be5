"""What commands share: loading a model, reading sequences, progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from subquad.checks import cli as checks
from subquad.data.vocabulary import SPECIALS

if TYPE_CHECKING:
    from torch import Tensor


class Loaded(NamedTuple):
    """A model, ready to be asked, and what it takes to speak to it."""

    model: Any
    tokenizer: Any
    domain: str

    @property
    def start(self) -> int:
        return self.model.config.bos_token_id

    @property
    def forbidden(self) -> list[int]:
        """Tokens that are never content: all specials but the one that ends a sequence."""
        if self.tokenizer is None:
            return [i for i in range(len(SPECIALS)) if i != self.start]
        return [i for i in self.tokenizer.all_special_ids if i != self.start]


def load_model(path: Path, *, head: bool = True) -> Loaded:
    """The model of a run or of a model folder; without its head if hidden states are wanted."""
    from transformers import AutoTokenizer

    from subquad import models
    from subquad.training import model_folder

    quiet()
    folder = model_folder(path)
    with checks.loadable(folder):
        config = models.SubquadConfig.from_pretrained(folder)
        checks.subquad_model(folder, config.model_type, config.domain)
        kind = (
            (models.SubquadForCausalLM if config.causal else models.SubquadForMaskedLM) if head else models.SubquadModel
        )
        model = kind.from_pretrained(folder)
    model.eval()
    tokens = None
    if config.domain != "image":
        place = folder if (folder / "tokenizer.json").exists() else None
        tokens = AutoTokenizer.from_pretrained(place) if place else default_tokenizer(config)
    return Loaded(model, tokens, config.domain or "")


def default_tokenizer(config: Any) -> Any:
    """Checkpoints hold no tokenizer; that of proteins and bytes is known."""
    from subquad.data import byte_tokenizer, protein_tokenizer
    from subquad.data.vocabulary import BYTES

    if config.domain == "protein":
        return protein_tokenizer()
    checks.byte_model(config.vocab_size, BYTES.size)
    return byte_tokenizer()


class Named(NamedTuple):
    name: str
    ids: "Tensor"  # [T], without special tokens


def read_sequences(loaded: Loaded, paths: list[Path]) -> list[Named]:
    """FASTA records, text files or images, as the model takes them."""
    import numpy as np
    import torch

    from subquad.data import encode, load_images, load_text, read_fasta
    from subquad.data.text import text_files

    if loaded.domain == "protein":
        found = [(name, encode(sequence, f"{path}: {name}")) for path in paths for name, sequence in read_fasta(path)]
    elif loaded.domain == "text":
        byte = loaded.tokenizer.vocab_size == default_tokenizer_size()
        corpora = ((file, load_text([file], None if byte else loaded.tokenizer)) for file in text_files(paths))
        found = [(str(file), corpus[0]) for file, corpus in corpora]
    else:
        levels = loaded.model.config.vocab_size - len(SPECIALS)
        corpora = ((path, load_images(path, levels=levels)) for path in paths)
        found = [(f"{path}:{i}", image) for path, corpus in corpora for i, image in enumerate(corpus)]
    return [Named(name, torch.from_numpy(ids.astype(np.int64))) for name, ids in found]


def default_tokenizer_size() -> int:
    from subquad.data.vocabulary import BYTES

    return BYTES.size


def quiet() -> None:
    """No progress bars and advice of other libraries among ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """Yields a function to be told of progress; shows a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
