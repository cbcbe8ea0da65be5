"""`subquad demo`: FAVOR beside exact attention and two controls, on proteins and on a task of memory."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.cli.bench_recall import measured, recall_table
from subquad.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.bench import DecodeCost
    from subquad.bench.recall import Plan, Result

FEATURES, NEAR, HIDDEN, HEADS = 64, 64, 128, 4
DECODED = ("softmax", "favor")
CONTEXTS = (1024, 16_384)
MEMORY_ROWS = ("identity", "window", "favor", "softmax")
MEMORY_KEYS, MEMORY_STEPS = 32, 150
MEMORY_FEATURES, MEMORY_NEAR = 48, 8  # a window of the same memory ends soon after 64 tokens, where "far" begins


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the plot and the protein.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 120,
    window: Annotated[int, typer.Option(help="Residues per training window.")] = 4096,
) -> int:
    """FAVOR beside exact attention and two controls, on proteins and on a task of memory; under five minutes.

    The controls are no attention at all (identity) and a window of the same memory as FAVOR: what a mechanism has over
    them is what it brings from far away. On these proteins that is nothing, on the task of memory everything.

    Interrupted, it goes on where it was; finished, it shows its results again.
    """
    from rich.console import Console

    from subquad.cli.common import quiet

    quiet()
    console = Console()
    models = mechanisms()
    console.print(f"{len(models)} models of proteins, windows of {window:,} residues, {steps} steps each\n")
    for name, options in models.items():
        console.rule(f"training with {name}")
        code = _train(name, options, out / name, steps, window)
        if code:
            return code
    results = {name: json.loads((out / name / "summary.json").read_text()) for name in models}
    console.rule("decoding")
    costs = {name: _decode(out / name) for name in DECODED}
    console.print(_table(results, costs))
    console.print(_verdict(results, costs), soft_wrap=True)
    console.rule("a task of memory: which value had this key?")
    plan, remembered = _remember(out / "memory")
    console.print(recall_table(plan, remembered))
    console.print(memory_verdict(remembered), soft_wrap=True)
    _plot(out, results, costs)
    console.print(f"plot: {printable(str(out / 'demo.png'))}", soft_wrap=True, markup=False)
    console.rule("a protein that the favor model made up")
    return _generate(out)


def mechanisms() -> dict[str, list[str]]:
    """The models of proteins: name of the mechanism, and its options at the command line."""
    from subquad.bench.recall.rows import Shape, window_of_equal_memory

    width = window_of_equal_memory(Shape(hidden=HIDDEN, heads=HEADS, features=FEATURES, near=NEAR))
    options = {
        "identity": {},
        "window": {"window": width},
        "softmax": {},
        "favor": {"num_features": FEATURES, "near": NEAR},
    }
    return {
        name: [word for key, value in given.items() for word in ("--option", f"{key}={value}")]
        for name, given in options.items()
    }


def _remember(folder: Path) -> "tuple[Plan, list[Result]]":
    """The task of memory; what is in the folder is not measured again."""
    from subquad.bench.recall import Plan
    from subquad.bench.recall.rows import Shape

    shape = Shape(features=MEMORY_FEATURES, near=MEMORY_NEAR)
    plan = Plan("recall", keys=MEMORY_KEYS, steps=MEMORY_STEPS, seeds=1, shape=shape)
    folder.mkdir(parents=True, exist_ok=True)
    return plan, measured(plan, MEMORY_ROWS, folder)


def memory_verdict(results: "list[Result]") -> str:
    """What the table says, computed from it."""
    from subquad.bench.recall import worth

    share = worth(results, "favor")
    far = {result.row: result.far for result in results}
    if share is None:
        return "Exact attention has not learned the task: nothing can be said of the others."
    return (
        f"Where a key was last seen more than 64 tokens ago, exact attention is right in {100 * far['softmax']:.0f} %, "
        f"favor in {100 * far['favor']:.0f} %, a window of the same memory in {100 * far['window']:.0f} %: of what "
        f"exact attention has over the window, favor has {100 * share:.0f} %."
    )


def _train(name: str, options: list[str], folder: Path, steps: int, window: int) -> int:
    """In a process of its own, so that memory is its own too."""
    shape = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "intermediate": 2 * HIDDEN, "attention": name}
    model = [word for key, value in shape.items() for word in (f"--{key}", str(value))] + options
    schedule = ["--steps", str(steps), "--window", str(window), "--eval-every", "50", "--save-every", "50"]
    command = [sys.executable, "-m", "subquad", "train", "protein", "--resume", "--out", str(folder), *model, *schedule]
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the child has got it too, and saves
            return process.wait()


def _decode(folder: Path) -> "list[DecodeCost]":
    import numpy as np
    import torch

    from subquad.bench import decode_costs
    from subquad.cli.common import load_model
    from subquad.data import Windows, load_proteins

    held_out = load_proteins().split(0.05)[1]
    tokens = Windows(held_out, CONTEXTS[-1], objective="causal", seed=0).tokens(0)
    return decode_costs(load_model(folder).model, torch.from_numpy(tokens.astype(np.int64)), CONTEXTS)


def _table(results: dict[str, Any], costs: "dict[str, list[DecodeCost]]") -> "Table":
    from rich.table import Table

    first = next(iter(results.values()))
    table = Table("", *results, title_justify="left")
    table.title = (
        f"residues by their frequency alone: perplexity {math.exp(first['unigram_loss']):.3f}, "
        f"accuracy {100 * first['unigram_accuracy']:.2f} %"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    metrics = [result["metrics"] for result in results.values()]
    table.add_row("held-out perplexity", *(f"{m['eval_perplexity']:.3f}" for m in metrics))
    table.add_row("held-out accuracy", *(f"{100 * m['eval_accuracy']:.2f} %" for m in metrics))
    table.add_row("seconds per step", *(_seconds(result["seconds_per_step"]) for result in results.values()))
    table.add_row("peak memory, training", *(_megabytes(result["peak_memory"]) for result in results.values()))
    for place, context in enumerate(CONTEXTS):
        rows = [costs[name][place] if name in costs else None for name in results]
        table.add_row(f"tokens/s at {context:,}", *(f"{row.tokens_per_second:,.0f}" if row else "" for row in rows))
        table.add_row(f"cache at {context:,}", *(_megabytes(row.cache_bytes) if row else "" for row in rows))
    return table


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f} MB"


def _verdict(results: dict[str, Any], costs: "dict[str, list[DecodeCost]]") -> str:
    """What the table says, computed from it."""
    unigram = math.exp(results["favor"]["unigram_loss"])
    gains = {name: 100 * (1 - result["metrics"]["eval_perplexity"] / unigram) for name, result in results.items()}
    near, far = costs["favor"]
    times = [results[name]["seconds_per_step"] for name in ("softmax", "favor")]
    step = f"A training step with favor takes 1/{times[0] / times[1]:.2f} of the time. " if None not in times else ""
    return (
        f"Perplexity below the unigram baseline: {', '.join(f'{name} {gain:.1f} %' for name, gain in gains.items())}.\n"
        f"{_what_proteins_need(gains)}\n"
        f"{step}Its decoding at {far.context:,} tokens takes "
        f"{far.timing.median / near.timing.median:.2f} times what it takes at {near.context:,}."
    )


def _what_proteins_need(gains: dict[str, float]) -> str:
    best = max(gains["softmax"], gains["favor"])
    if gains["window"] >= best:
        return "A window does at least as well: so few steps on these proteins need nothing from far away."
    return f"From beyond the window come {best - gains['window']:.1f} % of perplexity."


def _plot(out: Path, results: dict[str, Any], costs: "dict[str, list[DecodeCost]]") -> None:
    from matplotlib.figure import Figure

    from subquad.training.metrics import MetricsFile, draw_losses

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, decoding = figure.subplots(1, 2)
    curves = {name: MetricsFile(out / name).records() for name in results}
    draw_losses(losses, curves, unigram=results["favor"]["unigram_loss"], unit="residue")
    for number, (name, rows) in enumerate(costs.items()):
        places = [place + 0.35 * number for place in range(len(rows))]
        decoding.bar(places, [1000 * row.timing.median for row in rows], width=0.3, label=name)
    decoding.set_xticks([place + 0.175 for place in range(len(CONTEXTS))], [f"{c:,}" for c in CONTEXTS])
    decoding.set(xlabel="tokens before", ylabel="ms per token", title="decoding")
    decoding.legend()
    with checks.output_file(out / "demo.png"):
        files.save_figure(figure, out / "demo.png")


def _generate(out: Path) -> int:
    """Shown as it grows, and kept."""
    from subquad.cli.generate import generate

    options: dict[str, Any] = {"prompt": "M", "length": 240, "num": 1, "temperature": 0.9, "top_k": 0, "top_p": 0.95}
    options |= {"greedy": False, "endless": False, "seed": 0}
    code = generate(out / "favor", output=out / "protein.fasta", **options)
    print((out / "protein.fasta").read_text(encoding="utf-8"), end="")
    return code
