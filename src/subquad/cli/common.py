"""What commands share: loading a model, reading sequences, progress."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from subquad.checks import cli as checks
from subquad.data.vocabulary import SPECIALS
from subquad.errors import printable
from subquad.files import sweep

if TYPE_CHECKING:
    from torch import Tensor


class Loaded(NamedTuple):
    """A model, ready to run, and what turns files into its inputs."""

    model: Any
    tokenizer: Any
    domain: str

    @property
    def start(self) -> int:
        return self.model.config.bos_token_id

    @property
    def bytewise(self) -> bool:
        from subquad.data.vocabulary import BYTES

        return self.domain == "text" and self.model.config.vocab_size == BYTES.size

    @property
    def forbidden(self) -> list[int]:
        """Tokens that are never content: all specials but the one that ends a sequence."""
        if self.tokenizer is None:
            return [i for i in range(len(SPECIALS)) if i != self.start]
        return [i for i in self.tokenizer.all_special_ids if i != self.start]


def load_model(path: Path, *, head: bool = True) -> Loaded:
    """The model of a run or of a model folder; without its head if hidden states are wanted."""
    from subquad import models
    from subquad.training import checkpoints, model_folder
    from subquad.training.checksums import MANIFEST, verify

    quiet()
    folder = model_folder(path)
    if folder == checkpoints.folder_of(path) / folder.name:
        say(f"the run is not complete: taking {folder}")
    if (folder / MANIFEST).exists():
        verify(folder)
    with checks.loadable(folder):
        config = models.SubquadConfig.from_pretrained(folder, trust_remote_code=False)
        checks.subquad_model(folder, config)
        kind = (
            (models.SubquadForCausalLM if config.causal else models.SubquadForMaskedLM) if head else models.SubquadModel
        )
        model, report = cast(Any, kind).from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
        checks.whole_model(folder, report, allowed="lm_head." if not head else None)
        tokenizer = None if config.domain == "image" else load_tokenizer(folder, config)
    return Loaded(model.eval(), tokenizer, str(config.domain))


def load_tokenizer(folder: Path, config: Any) -> Any:
    """Checkpoints hold none; that of proteins and bytes is known."""
    from transformers import AutoTokenizer

    from subquad.data.vocabulary import BYTES, default_tokenizer

    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if config.domain == "text":
        checks.byte_model(config.vocab_size, BYTES.size)
    return default_tokenizer(config.domain)


def say(text: str) -> None:
    """A line for the user, apart from what the command prints; names in it cannot steer the terminal."""
    print(printable(text), file=sys.stderr)


def prepare_output(path: Path, suffixes: tuple[str, ...]) -> None:
    """Complains before the work, not after; what an earlier process left half-written is swept."""
    checks.output_suffix(path, suffixes)
    checks.output_folder(path)
    sweep(path.parent)


def prepare_json(path: Path) -> None:
    checks.json_file(path)
    sweep(path.parent)


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
        tokenizer = None if loaded.bytewise else loaded.tokenizer
        corpora = ((file, load_text([file], tokenizer)) for file in text_files(paths))
        found = [(_file_name(file), corpus[0]) for file, corpus in corpora]
    else:
        levels = loaded.model.config.vocab_size - len(SPECIALS)
        corpora = [(path, load_images(path, levels=levels)) for path in paths]
        for path, corpus in corpora:
            checks.image_shape(path, corpus.image_shape, loaded.model.config.image_shape)
        found = [(f"{_file_name(path)}:{i}", image) for path, corpus in corpora for i, image in enumerate(corpus)]
    return [Named(name, torch.from_numpy(ids.astype(np.int64))) for name, ids in found]


def _file_name(path: Path) -> str:
    """As text that any file can hold: bytes of a name that are no UTF-8 become escapes."""
    return str(path).encode(errors="backslashreplace").decode()


def load_with_sequences(path: Path, sequences: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    """A model of ours without its head, or one of Hugging Face, and its sequences, cut to `length` tokens."""
    from transformers import AutoConfig

    import subquad.models  # noqa: F401 - registers our models
    from subquad.training import model_folder

    quiet()
    folder = model_folder(path)
    with checks.loadable(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type != "subquad":
        return _load_hugging_face(folder, config, sequences, length)
    loaded = load_model(path, head=False)
    return loaded.model, cut_sequences(loaded, sequences, length)


def cut_sequences(loaded: Loaded, paths: list[Path], length: int) -> "list[Tensor]":
    """The first `length` tokens of each sequence, with the start token; of text, all windows of that many."""
    import torch

    named = read_sequences(loaded, paths)
    checks.something_to_read(len(named), paths)
    start = torch.tensor([loaded.start])
    pieces = [item.ids for item in named]
    if loaded.domain == "text":  # a file is many windows
        pieces = [piece for ids in pieces for piece in ids.split(max(1, length - 1))]
    return [torch.cat([start, ids])[:length] for ids in pieces]


def exact_model_with_sequences(path: Path, texts: list[Path], length: int) -> "tuple[Any, Any, list[Tensor]]":
    """A model of transformers as its folder says it is, its tokenizer, and texts, cut to `length` tokens."""
    import transformers

    import subquad.conversion  # noqa: F401 - knows converted models, which are refused in words

    quiet()
    checks.folder_there(path)
    with checks.loadable(path):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = checks.architecture(path, config, transformers)
    with checks.loadable(path):
        model, report = kind.from_pretrained(path, output_loading_info=True, trust_remote_code=False)
        checks.whole_model(path, report, allowed=None)
    tokenizer, sequences = _tokens(path, config, texts, length)
    return model.eval(), tokenizer, sequences


def converted_model_with_sequences(path: Path, texts: list[Path], length: int) -> "tuple[Any, Any, list[Tensor]]":
    """A converted model, its tokenizer, and texts, cut to `length` tokens."""
    import subquad.conversion

    quiet()
    checks.folder_there(path)
    with checks.loadable(path):
        model = subquad.conversion.load(path)
    tokenizer, sequences = _tokens(path, model.config, texts, length)
    return model.eval(), tokenizer, sequences


def _load_hugging_face(folder: Path, config: Any, paths: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    from transformers import AutoModel

    with checks.loadable(folder):
        model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    return model, _tokens(folder, config, paths, length)[1]


def _tokens(folder: Path, config: Any, paths: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    """The tokenizer of a model of transformers, and what it makes of text files."""
    import torch
    from transformers import AutoTokenizer

    from subquad.checks.data import readable
    from subquad.data.text import text_files

    with checks.loadable(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    checks.length_fits(length, getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    windows = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
    found = []
    for file in text_files(paths):
        with readable(file):
            text = file.read_text(encoding="utf-8")
        found += [torch.tensor(ids) for ids in tokenizer(text, **windows)["input_ids"]]
    checks.something_to_read(len(found), paths)
    return tokenizer, found


def batched(sequences: "list[Tensor]", tokens: int = 4096) -> "list[dict[str, Tensor]]":
    """As many sequences at once as make about `tokens`, padded on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    count = max(1, tokens // max(map(len, sequences)))
    batches = []
    for first in range(0, len(sequences), count):
        some = sequences[first : first + count]
        mask = pad_sequence([torch.ones_like(ids) for ids in some], batch_first=True)
        batches.append({"input_ids": pad_sequence(some, batch_first=True), "attention_mask": mask})
    return batches


def quiet() -> None:
    """No progress bars and advice of other libraries among ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """Yields a function to report progress to; shows a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
