"""Time and memory of every mechanism against exact attention, and against other packages that are installed.

Modes are forward, forward+backward and decode (one more token after a context). Each case is checked against its dense
definition first, outputs and gradients, and a wrong one gets no time. All cases of one mode, direction and length take
turns in one process, a 2048 x 2048 x 2048 matrix product among them, so that one spell of the machine hits them all.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from cases import EXACT, FEATURES, MODES, STEPS, Case, Shape, problem
from measuring import GEMM, Forecast, Group, Limits, all_cases, gemm_rate, measure_group, peak_in_child
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.bench.records import machine
from subquad.files import write_text

DIRECTIONS = {"bidirectional": False, "causal": True}
LENGTHS = [512, 2048, 8192, 16384, 32768, 131072]
CONTEXTS = [1024, 16384, 131072]
PRODUCTS = {"forward": 8, "forward+backward": 26}  # times B H L M D: the useful FLOPs of random features

EPILOG = """example, a minute or two:
  python benchmarks/attention.py --lengths 512 2048 --modes forward --only sdpa favor --skip-memory

"x sdpa" above 1 is faster than exact attention. "% gemm" is the share of the matrix product's rate that random features
reach, counting 8 B H L M D useful operations forward and 26 with backward. "peak MB" is memory above the inputs, from a
process of its own; when decoding, it is the size of the state or of the cache of keys and values.
"""


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    cases, notes = all_cases()
    check_options(parser, options, cases)
    if options.only:
        cases = [case for case in cases if any(part in case.name for part in options.only)]
    try:
        run(options, cases, notes)
    except KeyboardInterrupt:
        kept = f"; finished groups are in {options.output}" if options.output else ""
        sys.exit(f"interrupted{kept}")


# The command line -----------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def make_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=layout)
    add = parser.add_argument
    add("--lengths", type=positive, nargs="+", help=f"tokens, for forward and backward; default {listed(LENGTHS)}")
    add("--contexts", type=positive, nargs="+", help=f"tokens before those decoded; default {listed(CONTEXTS)}")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default all")
    add("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="default both; decode is causal")
    add("--only", nargs="+", metavar="PART", help="cases with one of these in their names, as in --only favor sdpa")
    add("--heads", type=positive, default=8, help="default 8")
    add("--head-dim", type=positive, default=64, help="default 64")
    add("--repeats", type=positive, default=5, help="samples of each time, default 5")
    add("--limit", type=above_zero, default=20, help="skip calls that would take more seconds than this, default 20")
    add("--memory-limit", type=above_zero, default=8, help="skip calls that would need more GB than this, default 8")
    add("--skip-memory", action="store_true", help="time only, which is quicker")
    add("--output", type=Path, help="JSON file for the records, written after every group")
    return parser


def listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: list[Case]) -> None:
    """Complains now, not after minutes of measuring; fills in the lengths that were not given."""
    check_output(parser, options.output)
    for part in options.only or []:
        if not any(part in case.name for case in cases):
            parser.error(f"--only: no case is called {part!r}; there are {', '.join(case.name for case in cases)}")
    if options.lengths and options.modes == ["decode"]:
        parser.error("--lengths: decode has --contexts instead")
    decodes = "decode" in options.modes and "causal" in options.directions
    if options.contexts and not decodes:
        parser.error("--contexts: only with --modes decode and --directions causal")
    if options.modes == ["decode"] and not decodes:
        parser.error("--directions: decode is causal")
    options.lengths = sorted(set(options.lengths or LENGTHS))  # shorter ones foretell the longer
    options.contexts = sorted(set(options.contexts or CONTEXTS))


def check_output(parser: argparse.ArgumentParser, output: Path | None) -> None:
    if output and not output.parent.is_dir():
        parser.error(f"--output: there is no folder {output.parent}")
    if output and output.is_dir():
        parser.error(f"--output: {output} is a folder")


# The run --------------------------------------------------------------------------------------------------------------


def make_groups(options: argparse.Namespace) -> list[Group]:
    groups = []
    for mode in (m for m in MODES if m in options.modes):
        for name in (d for d in DIRECTIONS if d in options.directions):
            causal = DIRECTIONS[name]
            if mode == "decode" and not causal:
                continue
            lengths = options.contexts if mode == "decode" else options.lengths
            groups += [Group(mode, causal, Shape(options.heads, length, options.head_dim)) for length in lengths]
    return groups


def run(options: argparse.Namespace, cases: list[Case], notes: list[str]) -> None:
    """Checks, measures group after group, shows and saves each."""
    console = Console()
    where = machine() | {"num_features": FEATURES, "steps_per_decode_sample": STEPS}
    report = {"machine": where, "options": plain(options), "notes": notes, "records": [], "skipped": []}
    console.print(", ".join(f"{key} {value}" for key, value in report["machine"].items()), style="dim")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        cases = check(cases, options.head_dim, report, progress)
        for note in notes:
            progress.console.print(note, style="yellow", markup=False, highlight=False)
        groups = make_groups(options)
        forecast = Forecast(Limits(options.limit, options.memory_limit * 1e9))
        task = progress.add_task("measuring", total=len(groups))
        for group in groups:
            records, skipped = measure(
                cases, group, options, forecast, lambda what: progress.update(task, description=what)
            )
            report["records"] += records
            report["skipped"] += skipped
            show(progress.console, group, records, skipped)
            if options.output:
                save(report, options.output)
            progress.advance(task)


def check(cases: list[Case], head_dim: int, report: dict, progress: Progress) -> list[Case]:
    """The cases that are right. A wrong peer is left out with a note; one of ours ends the benchmark."""
    right = []
    task = progress.add_task("checking", total=len(cases))
    for case in cases:
        progress.update(task, description=f"checking {case.name}")
        wrong = problem(case, head_dim)
        if wrong and not case.peer:
            sys.exit(f"{case.name} is wrong, so nothing is timed; relative errors: {wrong}")
        if wrong:
            report["notes"].append(f"{case.name} differs from its definition and is not timed: {wrong}")
        else:
            right.append(case)
        progress.advance(task)
    progress.remove_task(task)
    return right


def measure(
    cases: list[Case], group: Group, options: argparse.Namespace, forecast: Forecast, tell: Callable[[str], None]
) -> tuple[list[dict], list[dict]]:
    """Records of one group, and what was skipped."""
    able = [c for c in cases if (c.decodes() if group.mode == "decode" else group.causal in c.directions)]
    timings, states, reasons = measure_group(able, group, options.repeats, forecast, lambda s: tell(f"{group}: {s}"))
    rate = gemm_rate(timings[GEMM])
    exact = timings[EXACT].best if EXACT in timings else None
    where = {"mode": group.mode, "causal": group.causal, "length": group.shape.length}
    records = []
    for case in (case for case in able if case.name in timings):
        timing = timings[case.name]
        record = {"mechanism": case.name, **where, "best": timing.best, "median": timing.median}
        record |= {"samples": list(timing.samples), "times_exact": exact and exact / timing.best}
        products = PRODUCTS.get(group.mode, 0) * case.features * group.shape.heads * group.shape.length
        share = products * group.shape.head_dim / timing.best / rate
        record |= {"gemm_share": share or None, "gemm_gflops": rate / 1e9, "gated": case.gated, "about": case.about}
        if group.mode == "decode":
            record["state_bytes"] = states[case.name]
        elif not options.skip_memory:
            tell(f"{group}: memory of {case.name}")
            record["peak_bytes"] = peak_in_child(case.name, group)
        records.append(record)
    return records, [{"mechanism": name, **where, "reason": reason} for name, reason in reasons.items()]


def plain(options: argparse.Namespace) -> dict:
    """For JSON, without the path of the file itself."""
    return {key: value for key, value in vars(options).items() if key != "output"}


# Showing and saving ---------------------------------------------------------------------------------------------------


def save(report: dict, path: Path) -> None:
    """An interrupted run leaves the last whole file."""
    write_text(path, json.dumps(report, indent=1) + "\n")


def show(console: Console, group: Group, records: list[dict], skipped: list[dict]) -> None:
    rate = f", gemm {records[0]['gemm_gflops']:.0f} GFLOP/s" if records else ""
    table = Table("case", title=f"{group}{rate}", title_justify="left", min_width=70)
    for heading in ("best ms", "median", "x sdpa", "% gemm", "state MB" if group.mode == "decode" else "peak MB"):
        table.add_column(heading, justify="right")
    for r in records:
        size = r.get("state_bytes") if group.mode == "decode" else r.get("peak_bytes")
        table.add_row(
            r["mechanism"] if r["gated"] else f"{r['mechanism']} (not gated)",
            f"{1e3 * r['best']:,.3f}" if r["best"] < 0.01 else f"{1e3 * r['best']:,.1f}",
            f"{1e3 * r['median']:,.3f}" if r["best"] < 0.01 else f"{1e3 * r['median']:,.1f}",
            "-" if r["times_exact"] is None else f"{r['times_exact']:,.2f}",
            "-" if r["gemm_share"] is None else f"{100 * r['gemm_share']:.0f}",
            "-" if size is None else f"{size / 1e6:,.1f}",
        )
    console.print(table)
    for skip in skipped:
        console.print(f"skipped {skip['mechanism']}: {skip['reason']}", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    main()
