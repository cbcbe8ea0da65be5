"""What commands share: loading a model, reading sequences, progress."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from subquad.checks import architecture, pretrained
from subquad.checks import cli as checks
from subquad.data.vocabulary import SPECIALS
from subquad.errors import printable
from subquad.files import sweep

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "Run, model folder, folder of a model of transformers (converted or not), or its name on the hub, owner/name."
FILES = (
    "FASTA, text or image files, as the model takes them. For models of transformers: FASTA if the tokens of the model "
    "are single residues (ESM, protein BERT) or the file ends in .fasta, .fa or .faa (also .gz), else text."
)
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # no pickles, no code


class Named(NamedTuple):
    name: str
    ids: "Tensor"  # [T], without special tokens


@dataclass(frozen=True)
class Loaded:
    """A model of ours, ready to run, and what turns files into its inputs. `Pretrained` is the same of transformers."""

    model: Any
    tokenizer: Any
    domain: str

    @property
    def causal(self) -> bool:
        return bool(self.model.config.causal)

    @property
    def limit(self) -> int | None:
        """Tokens that it takes at most."""
        return None

    @property
    def start(self) -> int:
        return self.model.config.bos_token_id

    @property
    def before(self) -> tuple[int, ...]:
        """Special tokens in front of every sequence."""
        return (self.start,)

    @property
    def after(self) -> tuple[int, ...]:
        """Special tokens behind every sequence."""
        return ()

    @property
    def context(self) -> tuple[int, ...]:
        """What the first token of a sequence is judged after, and what generating without a prompt goes on from."""
        return self.before

    @property
    def mask(self) -> int:
        return SPECIALS.index("<mask>") if self.tokenizer is None else self.tokenizer.mask_token_id

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

    def check_predicts(self) -> None:
        """Raises if it predicts no tokens."""

    def check_generates(self, path: Path) -> None:
        """Raises if it cannot generate; path: as the user named it."""
        checks.causal_model(path, self.causal)

    def read(self, paths: list[Path]) -> list[Named]:
        """FASTA records, text files or images, as the model takes them."""
        return read_sequences(self, paths)

    def check_lengths(self, named: list[Named]) -> None:
        """Raises if one of them is longer than what the model takes."""
        limit, around = self.limit, len(self.before) + len(self.after)
        for item in named:
            pretrained.sequence_fits(item.name, around + len(item.ids), limit)

    def prompt_ids(self, prompt: str) -> "Tensor":
        """`[1, T]`: the start token and the prompt."""
        import numpy as np
        import torch

        from subquad.data import encode

        tokens: list[int] = []
        if self.domain == "protein":
            tokens = encode(prompt, "--prompt").astype(np.int64).tolist()
        elif self.domain == "text":
            raw = checks.utf8_prompt(prompt)
            whole = [byte + len(SPECIALS) for byte in raw]  # as in training: bytes know no special words
            tokens = whole if self.bytewise else self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return torch.tensor([[self.start, *tokens]])

    def generation(self, *, endless: bool) -> dict[str, Any]:
        """What `generate()` of transformers has to know of this model."""
        stop = not endless and self.domain != "image"
        return {
            "suppress_tokens": self.forbidden + ([] if stop else [self.start]),
            "eos_token_id": self.start if stop else None,
            "pad_token_id": self.model.config.pad_token_id,
        }

    @property
    def hidden(self) -> set[int]:
        """Special tokens, which are never shown."""
        return {self.start, *self.forbidden}

    @property
    def ends(self) -> list[int]:
        """New tokens that end a sequence, and are not shown."""
        return [self.start]

    def content(self, row: "Tensor", prompt: int) -> "Tensor":
        """The tokens to show of a row that was generated from `prompt` tokens. row `[T]`."""
        hidden = self.hidden
        return row[[token not in hidden for token in row.tolist()]]

    def text(self, ids: "Tensor | list[int]") -> str:
        return self.tokenizer.decode(ids)


def load_model(path: Path, *, head: bool = True) -> Loaded:
    """The model of a run or of a folder, ours or one of transformers; a folder that is not there may be a hub's name.

    head: False where hidden states are wanted, not predictions.
    """
    folder, config = read_config(path)
    if config.model_type == "subquad":
        return _load_own(folder, config, head)
    from subquad.cli.pretrained import load_pretrained

    return load_pretrained(folder, config, head=head)


def load_own_model(path: Path, command: str) -> Loaded:
    """One that was trained by subquad."""
    folder, config = read_config(path)
    architecture.trained_here(folder, config, command)
    return _load_own(folder, config, head=True)


def load_exact_model(path: Path) -> Loaded:
    """One of transformers, with the attention it was trained with."""
    from subquad.cli.pretrained import load_pretrained

    folder, config = read_config(path)
    architecture.exact_model(folder, config)
    return load_pretrained(folder, config)


def read_config(path: Path) -> tuple[Path, Any]:
    """The folder of a model, and its config; nothing in the folder is run."""
    from transformers import AutoConfig

    import subquad.conversion  # registers converted models
    import subquad.models  # noqa: F401 - registers ours
    from subquad.training import checkpoints, model_folder
    from subquad.training.checksums import MANIFEST, verify

    quiet()
    folder = model_folder(_from_hub(str(path)) if pretrained.looks_like_hub_name(path) else path)
    if folder == checkpoints.folder_of(path) / folder.name:
        say(f"the run is not complete: taking {folder}")
    if (folder / MANIFEST).exists():
        verify(folder)
    with checks.loadable(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return folder, config


def _from_hub(name: str) -> Path:
    """Where the files of a model of the hub are: those that came earlier, or those that come now."""
    from huggingface_hub import snapshot_download

    from subquad.training.checksums import MANIFEST

    with pretrained.from_the_hub(name):
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES], ignore_patterns=["*/*", MANIFEST]))


def _load_own(folder: Path, config: Any, head: bool) -> Loaded:
    from subquad import models

    with checks.loadable(folder):
        checks.subquad_model(folder, config)
        kind = (
            (models.SubquadForCausalLM if config.causal else models.SubquadForMaskedLM) if head else models.SubquadModel
        )
        model, report = cast(Any, kind).from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
        checks.whole_model(folder, report, allowed=() if head else ("lm_head.",))
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


def read_sequences(loaded: Loaded, paths: list[Path]) -> list[Named]:
    """Those of a model of ours."""
    import numpy as np
    import torch

    from subquad.data import encode, load_images, load_text, read_fasta
    from subquad.data.text import text_files

    if loaded.domain == "protein":
        found = [(name, encode(sequence, f"{path}: {name}")) for path in paths for name, sequence in read_fasta(path)]
    elif loaded.domain == "text":
        tokenizer = None if loaded.bytewise else loaded.tokenizer
        corpora = ((file, load_text([file], tokenizer)) for file in text_files(paths))
        found = [(file_name(file), corpus[0]) for file, corpus in corpora]
    else:
        levels = loaded.model.config.vocab_size - len(SPECIALS)
        corpora = [(path, load_images(path, levels=levels)) for path in paths]
        for path, corpus in corpora:
            checks.image_shape(path, corpus.image_shape, loaded.model.config.image_shape)
        found = [(f"{file_name(path)}:{i}", image) for path, corpus in corpora for i, image in enumerate(corpus)]
    return [Named(name, torch.from_numpy(ids.astype(np.int64))) for name, ids in found]


def file_name(path: Path) -> str:
    """As text that any file can hold: bytes of a name that are no UTF-8 become escapes."""
    return str(path).encode(errors="backslashreplace").decode()


def load_with_sequences(path: Path, sequences: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    """A model without its head, ours or one of transformers, and its sequences, cut to `length` tokens."""
    loaded = load_model(path, head=False)
    return loaded.model, cut_sequences(loaded, sequences, length)


def cut_sequences(loaded: Loaded, paths: list[Path], length: int) -> "list[Tensor]":
    """The first `length` tokens of each sequence, special ones included; of text, all windows of that many."""
    import torch

    checks.length_fits(length, loaded.limit)
    named = loaded.read(paths)
    checks.something_to_read(len(named), paths)
    before, after = torch.tensor(loaded.before, dtype=torch.long), torch.tensor(loaded.after, dtype=torch.long)
    room = max(1, length - len(before) - len(after))
    pieces = [item.ids for item in named]
    if loaded.domain == "text":  # a file is many windows
        pieces = [piece for ids in pieces for piece in ids.split(room)]
    return [torch.cat([before, ids[:room], after])[:length] for ids in pieces]


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
