"""`subquad bench recall`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad import checks as common
from subquad import files
from subquad.checks import bench as bench_checks
from subquad.checks import cli as checks
from subquad.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.bench.recall import Plan, Result
    from subquad.bench.recall.measure import Mean

KEYS, LENGTH, STEPS, SEEDS, FEATURES, NEAR = 64, 512, 200, 3, 128, 16
# a window of the memory of 32 features holds some 50 tokens
QUICK = {"keys": 16, "length": 256, "steps": 100, "seeds": 1, "features": 32, "near": 8}
POSITIONS = ("rotary", "sinusoidal", "none")
QUICK_ROWS = "identity,near-only,window,favor,softmax"


def recall(
    task: Annotated[
        str,
        typer.Option(
            help="recall (values of keys), copy (symbols after a silence), selective (symbols scattered over it), "
            "passkey (a number told in real text)."
        ),
    ] = "recall",
    rows: Annotated[
        str,
        typer.Option(help="What to compare, comma-separated; default: controls, every causal mechanism, references."),
    ] = "",
    keys: Annotated[int, typer.Option(help="How much there is to remember: keys, symbols or digits.")] = KEYS,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = LENGTH,
    also_at: Annotated[str, typer.Option(help="Other lengths to measure at, comma-separated.")] = "",
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = STEPS,
    seeds: Annotated[int, typer.Option(help="Models per row; standard errors are over them.")] = SEEDS,
    features: Annotated[int, typer.Option(help="Features of the rows that have any.")] = FEATURES,
    near: Annotated[int, typer.Option(help="Tokens in a near block of favor.")] = NEAR,
    positions: Annotated[str, typer.Option(help="rotary, sinusoidal or none, in every model.")] = "rotary",
    rotary_share: Annotated[float, typer.Option(help="Share of the numbers that rotary positions turn.")] = 1.0,
    short_conv: Annotated[int, typer.Option(help="Taps of the models' short convolutions; 0 for none.")] = 4,
    redraw_every: Annotated[int, typer.Option(help="Steps between fresh random features; 0 never.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="16 keys, 256 tokens, one seed, controls and favor: about a minute.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for recall.json and the picture.")] = Path("recall"),
) -> int:
    """Does what lies beyond the exact window reach the output? Small models, trained on tasks of memory.

    Every table has its controls: no attention (identity), the near blocks and sinks of favor alone (near-only), a
    window of the same memory as favor (window), and exact attention (softmax). What the far field is worth is
    (row - window) / (softmax - window). All rows take about half an hour on two cores; interrupted, the same command
    goes on.
    """
    from subquad.bench.recall import ROWS, TASKS, Plan
    from subquad.bench.recall.rows import Shape

    if quick:  # what was given stays
        usual = {"keys": KEYS, "length": LENGTH, "steps": STEPS, "seeds": SEEDS, "features": FEATURES, "near": NEAR}
        given = zip((keys, length, steps, seeds, features, near), usual, strict=True)
        keys, length, steps, seeds, features, near = (QUICK[n] if value == usual[n] else value for value, n in given)
        rows = rows or QUICK_ROWS
    bench_checks.choice("bench recall", "--task", task, tuple(TASKS))
    bench_checks.choice("bench recall", "--positions", positions, POSITIONS)
    chosen = bench_checks.names("--rows", rows, tuple(ROWS)) if rows else tuple(ROWS)
    plan = Plan(
        task,
        checks.count("--keys", keys),
        checks.count("--length", length),
        checks.count("--steps", steps),
        checks.count("--seeds", seeds),
        lengths=bench_checks.numbers("--also-at", also_at) if also_at else (),
        redraw_every=checks.count("--redraw-every", redraw_every, least=0),
        shape=Shape(
            short_conv=short_conv,
            positions=positions,
            rotary_share=common.share("bench recall", "--rotary-share", rotary_share),
            features=checks.count("--features", features),
            near=checks.count("--near", near),
        ),
    )
    for each in (plan.length, *plan.lengths):
        plan.make_task(each)  # says what is wrong before anything is trained
    with bench_checks.folder(output):
        output.mkdir(parents=True, exist_ok=True)
    files.sweep(output)
    _run(plan, chosen, output)
    return 0


def _run(plan: "Plan", names: tuple[str, ...], output: Path) -> None:
    from rich.console import Console

    from subquad.bench.recall.plot import plot_recall

    results = measured(plan, names, output)
    plot_recall(plan, results, output / "recall.png")
    console = Console()
    console.print(recall_table(plan, results))
    console.print(f"numbers and picture: {printable(str(output))}", highlight=False, markup=False)


def measured(plan: "Plan", names: tuple[str, ...], output: Path) -> "list[Result]":
    """Results of the rows. What an earlier run of the same plan left in the folder is taken, and stays there."""
    from subquad.bench.recall import ROWS, measure
    from subquad.cli.common import progress_bar, quiet

    quiet()
    path = output / "recall.json"
    results = _kept(plan, path)
    done = {(result.row, result.seed) for result in results}
    todo = [(ROWS[name], seed) for name in names for seed in range(plan.seeds) if (name, seed) not in done]
    with progress_bar(f"{plan.task}: training", len(todo) * plan.steps) as progress:
        for result in measure(plan, todo, progress):
            results.append(result)
            _save(plan, results, path)
    wanted = [result for result in results if result.row in names and result.seed < plan.seeds]
    return sorted(wanted, key=lambda result: (names.index(result.row), result.seed))


def _kept(plan: "Plan", path: Path) -> "list[Result]":
    """Of the same source and the same plan, but for the number of seeds; a damaged file has none."""
    from subquad.bench.recall import Result
    from subquad.bench.records import machine

    try:
        report = json.loads(path.read_text())
        wanted = json.loads(json.dumps(asdict(plan))) | {"seeds": report["plan"]["seeds"]}
        same = report["plan"] == wanted and report["machine"]["commit"] == machine()["commit"]
        found = report["results"] if same else []
        return [Result(**{**r, "elsewhere": {int(n): far for n, far in r["elsewhere"].items()}}) for r in found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _save(plan: "Plan", results: "list[Result]", path: Path) -> None:
    """After every model: a long run that is stopped goes on from there."""
    from subquad.bench.records import machine

    report = {"machine": machine(), "plan": asdict(plan), "results": [asdict(result) for result in results]}
    with checks.output_file(path):
        files.write_text(path, json.dumps(report, indent=1) + "\n")


def recall_table(plan: "Plan", results: "list[Result]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from subquad.bench.recall.measure import FAR, Mean, worth

    task = plan.make_task()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.title = (
        f"{task.about}: {plan.keys} keys, {plan.length:,} tokens, {plan.steps} steps; a guess is right in "
        f"{task.chance:.3f}"
    )
    columns = [f"seen <= {FAR} ago", f"> {FAR} ago", "worth", *(f"at {n:,}" for n in plan.lengths)]
    for column in ("", *columns, "ms per step", "state"):
        table.add_column(column, justify="right" if column else "left")
    for name in dict.fromkeys(result.row for result in results):
        mine = [result for result in results if result.row == name]
        share = worth(results, name)
        cells = [_shown(Mean.of([r.near for r in mine])), _shown(Mean.of([r.far for r in mine]))]
        cells += ["" if share is None else f"{100 * share:.0f} %"]
        cells += [_shown(Mean.of([r.elsewhere[length] for r in mine])) for length in plan.lengths]
        milliseconds = 1000 * min(r.seconds_per_step for r in mine)
        table.add_row(name, *cells, f"{milliseconds:.0f}", f"{mine[0].state / 1024:.0f} KiB")
    return table


def _shown(value: "Mean") -> str:
    """The mean, and its standard error in thousandths."""
    if math.isnan(value.value):
        return "-"
    return f"{value.value:.3f}" + ("" if math.isnan(value.error) else f" ±{1000 * value.error:.0f}")
