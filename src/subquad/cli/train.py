"""`subquad train protein|text|image`."""

import inspect
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.checks import cli as checks
from subquad.checks import data as data_checks
from subquad.errors import printable
from subquad.mechanisms import MECHANISMS

train_app = typer.Typer(
    help="Train a model on your sequences; every run can be interrupted and resumed.",
    epilog="Example: subquad train protein my.fasta --attention favor --window 8192 --out runs/mine",
    no_args_is_help=True,
)

DATA, MODEL, OPTIMISATION, RUN = "Data", "Model", "Optimisation", "Run"


def _option(help: str, panel: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **extra)


Out = Annotated[Path, _option("Folder of the run: options, metrics, plot, checkpoints, model.", RUN)]
Resume = Annotated[
    bool, _option("Go on where the run in --out stopped, with its options; or begin, if it has not.", RUN, "--resume")
]
Init = Annotated[str | None, _option("Begin with the weights of this run or model (fine-tuning).", MODEL)]
Tensorboard = Annotated[bool, _option("Also log for TensorBoard.", RUN, "--tensorboard")]
SaveEvery = Annotated[int, _option("Steps between checkpoints.", RUN)]
Keep = Annotated[int, _option("Checkpoints to keep.", RUN)]
LogEvery = Annotated[int, _option("Steps between records.", RUN)]
Seed = Annotated[int, _option("Of weights, features, order, crops and masks.", RUN)]
Threads = Annotated[int | None, _option("Of torch; as many as there are cores unless given.", RUN)]
Attention = Annotated[
    str,
    _option(f"{', '.join(m.name for m in MECHANISMS)}; or one for each layer: favor,favor,softmax.", MODEL),
]
Options = Annotated[
    list[str] | None,
    _option("NAME=VALUE of the mechanism, such as num_features=128; may be repeated.", MODEL, "--option"),
]
Layers = Annotated[int, _option("Layers.", MODEL)]
Hidden = Annotated[int, _option("Width.", MODEL)]
Heads = Annotated[int, _option("Attention heads.", MODEL)]
KeyValueHeads = Annotated[int | None, _option("Fewer key heads than heads (grouped-query attention).", MODEL)]
Intermediate = Annotated[int | None, _option("Width inside the MLP; four times the width unless given.", MODEL)]
Positions = Annotated[str, _option("rotary, sinusoidal, learned or none.", MODEL)]
Dropout = Annotated[float, _option("Dropout of residual branches.", MODEL)]
Reversible = Annotated[bool, _option("Rebuild activations in backward instead of keeping them.", MODEL, "--reversible")]
Checkpointing = Annotated[
    bool, _option("Recompute each layer in backward to save memory.", MODEL, "--gradient-checkpointing")
]
RedrawEvery = Annotated[int, _option("Steps between fresh random features; 0 never.", MODEL)]
UpdateEvery = Annotated[int, _option("Steps between moves of centroids (cluster); 0 never.", MODEL)]
SharedQk = Annotated[bool, _option("Keys are the normalised queries, as in a Reformer.", MODEL, "--shared-qk")]
Objective = Annotated[str, _option("causal (next token) or masked (15 %, as BERT).", OPTIMISATION)]
Steps = Annotated[int, _option("Optimiser steps.", OPTIMISATION)]
BatchSize = Annotated[int, _option("Windows per process and forward pass.", OPTIMISATION)]
Accumulate = Annotated[int, _option("Forward passes per step.", OPTIMISATION)]
Optimizer = Annotated[str, _option("muon (with AdamW for vectors) or adamw.", OPTIMISATION)]
LearningRate = Annotated[float, _option("Peak learning rate.", OPTIMISATION)]
Warmup = Annotated[int, _option("Steps until the peak.", OPTIMISATION)]
Schedule = Annotated[str, _option("cosine, linear or constant.", OPTIMISATION)]
WeightDecay = Annotated[float, _option("Of matrices.", OPTIMISATION)]
Precision = Annotated[str, _option("float32, bfloat16 or float16 (mixed).", OPTIMISATION)]
Window = Annotated[int, _option("Tokens per sample.", DATA)]
Layout = Annotated[str, _option("windows (sequences joined by separators) or crops (one sequence each).", DATA)]
Validation = Annotated[float, _option("Share of sequences held out; copies of one never end up on both sides.", DATA)]
EvalEvery = Annotated[int, _option("Steps between evaluations.", DATA)]
EvalSamples = Annotated[int, _option("Held-out samples to evaluate.", DATA)]


def _training_options(
    out: Out = Path("run"), resume: Resume = False, tensorboard: Tensorboard = False,
    attention: Attention = "favor", option: Options = None, layers: Layers = 4, hidden: Hidden = 128,
    heads: Heads = 4, key_value_heads: KeyValueHeads = None, intermediate: Intermediate = None,
    positions: Positions = "rotary", dropout: Dropout = 0.0,
    reversible: Reversible = False, gradient_checkpointing: Checkpointing = False, redraw_every: RedrawEvery = 0,
    update_every: UpdateEvery = 1, shared_qk: SharedQk = False,
    objective: Objective = "causal", steps: Steps = 500, batch_size: BatchSize = 1, accumulate: Accumulate = 1,
    optimizer: Optimizer = "muon", learning_rate: LearningRate = 0.01, warmup: Warmup = 20,
    schedule: Schedule = "linear", weight_decay: WeightDecay = 0.0, precision: Precision = "float32",
    window: Window = 4096, layout: Layout = "windows", validation: Validation = 0.05, eval_every: EvalEvery = 100,
    eval_samples: EvalSamples = 16, save_every: SaveEvery = 100, keep: Keep = 2, log_every: LogEvery = 10,
    init: Init = None, seed: Seed = 0, threads: Threads = None,
) -> None:  # fmt: skip
    """The options that all kinds of training share."""


def _with_training_options(*without: str, **defaults: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Adds them to a command that takes `**training`, for typer to see; some left out, some with other defaults."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [p for p in inspect.signature(_training_options).parameters.values() if p.name not in without]
        shared = [p.replace(default=defaults.get(p.name, p.default)) for p in shared]
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
    result = train(
        corpus, given["out"], _options(context, given), resume=given["resume"], tokenizer=tokenizer,
        tensorboard=given["tensorboard"], console=console,
    )  # fmt: skip
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


def _options(context: typer.Context, given: dict[str, Any]) -> Any:
    """The options of the command; when resuming, those not given are the run's."""
    from subquad.training import TrainOptions
    from subquad.training.options import RunRecord

    names = given["attention"].split(",")
    chosen = {**given, "attention": names if len(names) > 1 else names[0]}
    chosen["attention_options"] = checks.option_pairs(given["option"] or [])
    known = {field.name for field in fields(TrainOptions)}
    chosen = {name: value for name, value in chosen.items() if name in known}
    path = given["out"] / "run.json"
    if not given["resume"] or not path.exists():
        return TrainOptions(**chosen)
    typed = {name for name in given if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    typed |= {"attention_options"} if "option" in typed else set()
    return replace(RunRecord.load(path).options, **{name: value for name, value in chosen.items() if name in typed})
