"""`subquad generate`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.checks import pretrained
from subquad.cli.common import MODEL
from subquad.errors import printable

if TYPE_CHECKING:
    from torch import Tensor

    from subquad.cli.common import Loaded

LINE = 60  # residues per line of FASTA
USUAL = 500  # new tokens, unless another number is given


def generate(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    prompt: Annotated[str, typer.Option(help="What to continue: residues, or text.")] = "",
    length: Annotated[
        int | None,
        typer.Option(
            help="New tokens at most (500 unless given), far beyond training if you like; a model of transformers has "
            "a limit."
        ),
    ] = None,
    num: Annotated[int, typer.Option(help="How many to generate.")] = 1,
    temperature: Annotated[float, typer.Option(help="Below 1 safer, above 1 wilder.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens only; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    endless: Annotated[bool, typer.Option("--endless", help="Do not stop where the model ends a sequence.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="File: .fasta for proteins, .txt for text, .png or .npz for images.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> int:
    """Sample from a causal model, at constant memory and time per token.

    Without --output, one sample is shown as it grows, several are printed at the end.

    Models of transformers generate with their own tokenizer and stop at the end tokens of their generation_config.json,
    whose other settings, such as a repetition penalty, count, too; sampling is by the options here. Without a prompt
    they begin with the token that their tokenizer puts in front of texts, or else its start or end token.
    Converted ones generate with the states of their mechanisms, the others with a cache that grows.
    """
    from subquad.cli.common import load_model, say

    checks.sampling(temperature, top_k, top_p)
    checks.count("--num", num)
    checks.generate_seed(seed)
    loaded = load_model(model)
    loaded.check_generates(model)
    output = _check_output(loaded, output, prompt)
    sampling: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature}
    if not greedy:
        sampling |= {"top_k": top_k, "top_p": top_p}
    live = num == 1 and output is None
    ids = loaded.prompt_ids(prompt)
    new = _length(loaded, length, ids.shape[1])
    samples, speed = _sample(loaded, ids, new, num, seed, sampling | loaded.generation(endless=endless), live=live)
    if output is not None:
        with checks.output_file(output), files.written(output) as staging:
            _write(loaded, samples, staging, model)
    elif not live:
        print(_as_text(loaded, samples, model), end="")
    say(f"{speed:,.0f} tokens/s, seed {seed}" + (f", written to {output}" if output else ""))
    return 0


def _check_output(loaded: "Loaded", output: Path | None, prompt: str) -> Path | None:
    from subquad.cli.common import prepare_output

    if loaded.domain == "image":
        checks.no_prompt(prompt)
        output = output or Path("images.png")
    if output is not None:
        suffixes = {"protein": (".fasta", ".fa"), "text": (".txt",), "image": (".png", ".npz")}
        prepare_output(output, suffixes[loaded.domain])
    return output


def _length(loaded: "Loaded", length: int | None, prompt: int) -> int:
    """New tokens at most; prompt: how many come before them."""
    if loaded.domain != "image":
        checks.new_tokens(USUAL if length is None else length)
        return pretrained.new_tokens_fit(length, USUAL, prompt, loaded.limit)
    checks.no_length(length)
    pixels = 1
    for size in loaded.model.config.image_shape:
        pixels *= size
    return pixels


def _sample(
    loaded: "Loaded", ids: "Tensor", length: int, num: int, seed: int, options: dict[str, Any], *, live: bool
) -> tuple[list["Tensor"], float]:
    """Tokens to show of each sample, and new tokens per second. ids `[1, T]`: the prompt."""
    import torch

    streamer = Stream(loaded, num, length, live=live)
    torch.manual_seed(seed)
    begun = time.perf_counter()
    with streamer, torch.inference_mode():
        out = loaded.model.generate(
            ids.repeat(num, 1),
            attention_mask=torch.ones(num, ids.shape[1], dtype=torch.long),
            max_new_tokens=length,
            streamer=streamer,
            **options,
        )
    seconds = time.perf_counter() - begun
    return [loaded.content(row, ids.shape[1]) for row in out.cpu()], streamer.count / seconds


class Stream:
    """What `generate` tells of new tokens: shown as they come, or counted in a bar."""

    def __init__(self, loaded: "Loaded", num: int, length: int, *, live: bool) -> None:
        from subquad.cli.common import progress_bar

        self.loaded, self.live, self.count = loaded, live, 0
        self._shown: list[int] = []  # the tokens shown last, and those that wait
        self._pending: list[int] = []
        self._column = 0
        self._bar = None if live else progress_bar("generating", num * length)
        self._advance: Any = None
        self._prompt_seen = False
        self._hidden, self._ends = loaded.hidden, set(loaded.ends)

    def __enter__(self) -> "Stream":
        self._advance = None if self._bar is None else self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)
        elif self._column:
            print(flush=True)

    def put(self, tokens: "Tensor") -> None:
        tokens = tokens.flatten()
        if self._prompt_seen:
            self.count += len(tokens)
        if not self.live and self._prompt_seen:
            self._advance(len(tokens))
        if self.live:
            self._show(tokens.tolist())
        self._prompt_seen = True

    def end(self) -> None:
        if self._pending:
            self._write(self._text())
            self._pending = []

    def _show(self, tokens: list[int]) -> None:
        """Bytes of an unfinished character wait for the rest of it."""
        hidden = self._hidden | self._ends if self._prompt_seen else self._hidden
        self._pending += [token for token in tokens if token not in hidden]
        text = self._text()
        if text and not text.endswith("\ufffd"):
            self._write(text)
            self._shown, self._pending = self._pending, []

    def _text(self) -> str:
        """What the tokens that wait add to those before them: alone, some tokenizers drop the space in front."""
        before = self.loaded.text(self._shown)
        return self.loaded.text(self._shown + self._pending)[len(before) :]

    def _write(self, text: str) -> None:
        if self.loaded.domain == "protein":
            for letter in text:
                end = "\n" if self._column == LINE - 1 else ""
                print(letter, end=end, flush=True)
                self._column = 0 if end else self._column + 1
        else:
            print(text, end="", flush=True)
            self._column = 1


def _write(loaded: "Loaded", samples: list["Tensor"], output: Path, model: Path) -> None:
    if loaded.domain == "image":
        _write_images(loaded, samples, output)
        return
    output.write_bytes(_as_text(loaded, samples, model).encode())


def _as_text(loaded: "Loaded", samples: list["Tensor"], model: Path) -> str:
    """FASTA for proteins, paragraphs for text."""
    texts = [loaded.text(sample) for sample in samples]
    if loaded.domain == "text":
        return "\n\n".join(texts) + "\n"
    records = []
    for number, text in enumerate(texts, 1):
        lines = "\n".join(text[i : i + LINE] for i in range(0, len(text), LINE))
        records.append(f">generated_{number} length={len(text)} model={printable(str(model))}\n{lines}\n")
    return "".join(records)


def _write_images(loaded: "Loaded", samples: list["Tensor"], output: Path) -> None:
    import numpy as np

    from subquad.data.vocabulary import SPECIALS

    config = loaded.model.config
    levels = config.vocab_size - len(SPECIALS)
    values = np.stack([sample.numpy() for sample in samples]) - len(SPECIALS)
    images = (values * 255 // (levels - 1)).astype(np.uint8).reshape(-1, *config.image_shape)
    if output.suffix == ".npz":
        np.savez_compressed(output, images=images)
        return
    from PIL import Image

    columns = int(np.ceil(len(images) ** 0.5))
    missing = -len(images) % columns
    padded = np.concatenate([images, np.zeros((missing, *images.shape[1:]), np.uint8)])
    rows = [np.concatenate(list(padded[i : i + columns]), axis=1) for i in range(0, len(padded), columns)]
    Image.fromarray(np.concatenate(rows, axis=0).squeeze()).save(output)
