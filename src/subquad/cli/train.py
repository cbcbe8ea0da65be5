"""`subquad train protein|text|image`."""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from subquad.checks import cli as checks
from subquad.checks import data as data_checks
from subquad.errors import printable
from subquad.training.options import DATA, RUN, Option, RunRecord, TrainOptions

train_app = typer.Typer(
    help="Train a model on your sequences; every run can be interrupted and resumed.",
    epilog="Example: subquad train protein my.fasta --attention favor --window 8192 --out runs/mine",
    no_args_is_help=True,
)


def _option(help: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def _run_parameters(
    out: Annotated[Path, _option("Folder of the run: options, metrics, plot, checkpoints, model.", RUN)] = Path("run"),
    resume: Annotated[
        bool,
        _option("Go on where the run in --out stopped, with its options; or begin, if it has not.", RUN, "--resume"),
    ] = False,
    tensorboard: Annotated[bool, _option("Also log for TensorBoard.", RUN, "--tensorboard")] = False,
) -> None:
    """What all kinds of training take beside `TrainOptions`."""


def _option_parameters() -> Iterator[inspect.Parameter]:
    """The fields of `TrainOptions` that are options of the command, as typer takes them."""
    for field in fields(TrainOptions):
        option = next((note for note in get_args(field.type)[1:] if isinstance(note, Option)), None)
        if option is not None:
            kind = option.typed or get_args(field.type)[0]
            flag = option.flag or f"--{field.name.replace('_', '-')}"
            default = None if field.default is MISSING else field.default
            annotation = Annotated[kind, _option(option.help, option.panel, flag)]
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_training_options(*without: str, **defaults: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Adds them to a command that takes `**training`, for typer to see; some left out, some with other defaults."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [*inspect.signature(_run_parameters).parameters.values(), *_option_parameters()]
        shared = [p.replace(default=defaults.get(p.name, p.default)) for p in shared if p.name not in without]
        signature = inspect.Signature([*own, *shared], return_annotation=int)
        setattr(command, "__signature__", signature)  # noqa: B010 - a function's type declares none
        command.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
        return command

    return add


@train_app.command(epilog="Example: subquad train protein my.fasta --window 8192 --steps 2000 --out runs/mine")
@_with_training_options()
def protein(
    context: typer.Context,
    fasta: Annotated[
        list[Path] | None, typer.Argument(help="FASTA files, plain or gz; none: a sample of UniProt.")
    ] = None,
    **training: Any,
) -> int:
    """Train on protein sequences (FASTA), residue by residue."""
    from subquad.data import load_proteins

    return _train(context, load_proteins(fasta or []), training)


@train_app.command(epilog="Example: subquad train text books/ --window 16384 --out runs/books", no_args_is_help=True)
@_with_training_options()
def text(
    context: typer.Context,
    source: Annotated[list[str], typer.Argument(help="Files, folders, or hf:NAME[:COLUMN] of the Hugging Face hub.")],
    tokenizer: Annotated[str | None, _option("Name or folder of a Hugging Face tokenizer; none: bytes.", DATA)] = None,
    **training: Any,
) -> int:
    """Train on text: files, folders, or a dataset of the hub; byte by byte, or with a tokenizer."""
    from subquad.data import hub_texts, is_hub_name, load_text, texts_corpus

    tokens = _tokenizer(tokenizer)
    if any(map(is_hub_name, source)):
        data_checks.one_hub_name(source)
        return _train(context, texts_corpus(hub_texts(source[0]), tokens), training, tokens)
    return _train(context, load_text(source, tokens), training, tokens)


@train_app.command(
    epilog="Example: subquad train image train-images-idx3-ubyte.gz --batch-size 16 --out runs/mnist",
    no_args_is_help=True,
)
@_with_training_options("window", "layout", batch_size=8, eval_samples=64)
def image(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="idx file (MNIST), npz with an array 'images', or folder of PNG.")],
    levels: Annotated[int, _option("Values per pixel and channel, 2 to 256.", DATA)] = 256,
    **training: Any,
) -> int:
    """Train on images as sequences of pixels; quality in bits per dimension."""
    from subquad.data import load_images

    return _train(context, load_images(source, levels=levels), training)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    with data_checks.tokenizer(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _train(context: typer.Context, corpus: Any, given: dict[str, Any], tokenizer: Any = None) -> int:
    from rich.console import Console

    from subquad.cli.common import quiet
    from subquad.training import train
    from subquad.training.callbacks import describe

    quiet()
    console = Console(stderr=True, highlight=False)
    stored = RunRecord.load(given["out"]) if given["resume"] else None
    result = train(
        corpus,
        given["out"],
        _options(context, given, stored),
        resume=stored or given["resume"],
        tokenizer=tokenizer,
        tensorboard=given["tensorboard"],
        console=console,
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    if result.stopped_by is not None:
        console.print(f"stopped and saved at step {result.step}; the same command with --resume goes on")
        return 128 + result.stopped_by
    reached = describe(result.metrics["eval_loss"], result.metrics["eval_accuracy"], result.unit)
    baseline = describe(result.unigram_loss, result.unigram_accuracy, result.unit)
    console.print(f"held out:         {reached}\nunigram baseline: {baseline}", soft_wrap=True)
    folder = printable(result.folder)
    console.print(f"model: {folder}/model  plot: {folder}/loss.png", soft_wrap=True, markup=False)
    return 0


def _options(context: typer.Context, given: dict[str, Any], stored: RunRecord | None) -> TrainOptions:
    """The options of the command; when resuming, those not given are the run's."""
    names = given["attention"].split(",")
    given = {**given, "attention": names if len(names) > 1 else names[0]}
    given["attention_options"] = checks.option_pairs(given["attention_options"] or [])
    chosen = {field.name: given[field.name] for field in fields(TrainOptions) if field.name in given}
    if stored is None:
        return TrainOptions(**chosen)
    typed = {name for name in chosen if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    return replace(stored.options, **{name: chosen[name] for name in typed})
