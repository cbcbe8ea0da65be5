"""`subquad demo`: exact attention and FAVOR, the same small protein model, side by side."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.bench import DecodeCost

MECHANISMS = {"softmax": [], "favor": ["--option", "num_features=64"]}
CONTEXTS = (1024, 16_384)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the two runs, the plot and the protein.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 200,
    window: Annotated[int, typer.Option(help="Residues per training window.")] = 4096,
) -> int:
    """Train the same small model twice, with exact attention and with FAVOR, and compare; under five minutes.

    Interrupted, it goes on where it was; finished, it shows its results again.
    """
    from rich.console import Console

    from subquad.cli.common import quiet

    quiet()
    console = Console()
    console.print(f"Two models of proteins, windows of {window:,} residues, {steps} steps each\n")
    for name in MECHANISMS:
        console.rule(f"training with {name}")
        code = _train(name, out / name, steps, window)
        if code:
            return code
    results = {name: json.loads((out / name / "summary.json").read_text()) for name in MECHANISMS}
    console.rule("decoding")
    costs = {name: _decode(out / name) for name in MECHANISMS}
    console.print(_table(results, costs))
    console.print(_verdict(results, costs), soft_wrap=True)
    _plot(out, results, costs)
    console.print(f"plot: {printable(str(out / 'demo.png'))}", soft_wrap=True, markup=False)
    console.rule("a protein that the favor model made up")
    return _generate(out)


def _train(name: str, folder: Path, steps: int, window: int) -> int:
    """In a process of its own, so that memory is its own too."""
    model = [
        "--layers",
        "2",
        "--hidden",
        "128",
        "--heads",
        "4",
        "--intermediate",
        "256",
        "--attention",
        name,
        *MECHANISMS[name],
    ]
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

    table = Table("", "unigram", *results)
    for column in table.columns[1:]:
        column.justify = "right"
    first = next(iter(results.values()))
    metrics = [result["metrics"] for result in results.values()]
    table.add_row(
        "held-out perplexity",
        f"{math.exp(first['unigram_loss']):.3f}",
        *(f"{m['eval_perplexity']:.3f}" for m in metrics),
    )
    table.add_row(
        "held-out accuracy",
        f"{100 * first['unigram_accuracy']:.2f} %",
        *(f"{100 * m['eval_accuracy']:.2f} %" for m in metrics),
    )
    table.add_row("seconds per step", "", *(_seconds(result["seconds_per_step"]) for result in results.values()))
    table.add_row("peak memory, training", "", *(_megabytes(result["peak_memory"]) for result in results.values()))
    for place, context in enumerate(CONTEXTS):
        rows = [cost[place] for cost in costs.values()]
        table.add_row(f"decoding at {context:,}", "", *(f"{row.tokens_per_second:,.0f} tokens/s" for row in rows))
        table.add_row(f"cache at {context:,}", "", *(_megabytes(row.cache_bytes) for row in rows))
    return table


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f} MB"


def _verdict(results: dict[str, Any], costs: "dict[str, list[DecodeCost]]") -> str:
    """What the table says, computed from it."""
    unigram = math.exp(results["favor"]["unigram_loss"])
    exact, favor = (results[name]["metrics"]["eval_perplexity"] for name in ("softmax", "favor"))
    near, far = costs["favor"]
    times = [results[name]["seconds_per_step"] for name in ("softmax", "favor")]
    step = f"A training step with favor takes 1/{times[0] / times[1]:.2f} of the time. " if None not in times else ""
    return (
        f"Perplexity below the unigram baseline: exact {100 * (1 - exact / unigram):.1f} %, "
        f"favor {100 * (1 - favor / unigram):.1f} %; favor against exact: {100 * (favor / exact - 1):+.2f} %.\n"
        f"{step}Its decoding at {far.context:,} tokens takes "
        f"{far.timing.median / near.timing.median:.2f} times what it takes at {near.context:,}."
    )


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
