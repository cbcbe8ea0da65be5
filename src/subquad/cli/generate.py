"""`subquad generate`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.errors import printable

if TYPE_CHECKING:
    from torch import Tensor

    from subquad.cli.common import Loaded

LINE = 60  # residues per line of FASTA


def generate(
    model: Annotated[Path, typer.Argument(help="Run or model folder.")],
    prompt: Annotated[str, typer.Option(help="What to continue: residues, or text.")] = "",
    length: Annotated[
        int | None, typer.Option(help="New tokens at most (500 unless given), far beyond training if you like.")
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
    """
    from subquad.cli.common import load_model, say

    checks.sampling(temperature, top_k, top_p)
    checks.count("--num", num)
    checks.generate_seed(seed)
    loaded = load_model(model)
    checks.causal_model(model, bool(loaded.model.config.causal))
    output = _check_output(loaded, output, prompt)
    sampling: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature}
    if not greedy:
        sampling |= {"top_k": top_k, "top_p": top_p}
    live = num == 1 and output is None
    samples, speed = _sample(loaded, prompt, _length(loaded, length), num, seed, endless, sampling, live=live)
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


def _length(loaded: "Loaded", length: int | None) -> int:
    if loaded.domain != "image":
        return checks.new_tokens(500 if length is None else length)
    checks.no_length(length)
    pixels = 1
    for size in loaded.model.config.image_shape:
        pixels *= size
    return pixels


def _sample(
    loaded: "Loaded",
    prompt: str,
    length: int,
    num: int,
    seed: int,
    endless: bool,
    sampling: dict[str, Any],
    *,
    live: bool,
) -> tuple[list["Tensor"], float]:
    """Token ids without specials, and tokens per second."""
    import torch

    ids = prompt_ids(loaded, prompt)
    stop = not endless and loaded.domain != "image"
    streamer = Stream(loaded, num, length, live=live)
    torch.manual_seed(seed)
    begun = time.perf_counter()
    with streamer, torch.inference_mode():
        out = loaded.model.generate(
            ids.repeat(num, 1),
            attention_mask=torch.ones(num, ids.shape[1], dtype=torch.long),
            max_new_tokens=length,
            suppress_tokens=loaded.forbidden + ([] if stop else [loaded.start]),
            eos_token_id=loaded.start if stop else None,
            pad_token_id=loaded.model.config.pad_token_id,
            streamer=streamer,
            **sampling,
        )
    seconds = time.perf_counter() - begun
    made = [row[1:] for row in out.cpu()]  # without the start token
    made = [row[~torch.isin(row, torch.tensor([loaded.start, *loaded.forbidden]))] for row in made]
    return made, streamer.count / seconds


def prompt_ids(loaded: "Loaded", prompt: str) -> "Tensor":
    """`[1, T]`: the start token and the prompt."""
    import numpy as np
    import torch

    from subquad.data import encode
    from subquad.data.vocabulary import SPECIALS

    if loaded.domain == "protein":
        tokens = encode(prompt, "--prompt").astype(np.int64).tolist()
    elif loaded.domain == "text":
        raw = checks.utf8_prompt(prompt)
        whole = [byte + len(SPECIALS) for byte in raw]  # as in training: bytes know no special words
        tokens = whole if loaded.bytewise else loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    else:
        tokens = []
    return torch.tensor([[loaded.start, *tokens]])


class Stream:
    """What `generate` tells of new tokens: shown as they come, or counted in a bar."""

    def __init__(self, loaded: "Loaded", num: int, length: int, *, live: bool) -> None:
        from subquad.cli.common import progress_bar

        self.loaded, self.live, self.count, self._pending = loaded, live, 0, []
        self._column = 0
        self._bar = None if live else progress_bar("generating", num * length)
        self._advance: Any = None
        self._prompt_seen = False

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
        elif self.live:
            tokens = tokens[1:]  # the start token is not shown
        if not self.live and self._prompt_seen:
            self._advance(len(tokens))
        self._prompt_seen = True
        if self.live:
            self._show(tokens.tolist())

    def end(self) -> None:
        if self._pending:
            self._write(self.loaded.tokenizer.decode(self._pending))
            self._pending = []

    def _show(self, tokens: list[int]) -> None:
        """Bytes of an unfinished character wait for the rest of it."""
        self._pending += [token for token in tokens if token != self.loaded.start]
        text = self.loaded.tokenizer.decode(self._pending)
        if text and not text.endswith("\ufffd"):
            self._write(text)
            self._pending = []

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
    texts = [loaded.tokenizer.decode(sample) for sample in samples]
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
