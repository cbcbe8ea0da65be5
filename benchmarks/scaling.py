"""What the native engine makes of more threads, and of more tokens.

    python benchmarks/scaling.py --output scaling.json

Threads: the same call with one thread and with all, in turn. Length: time per token of one head, causal, forward and
backward, and the memory that the longest call needs above its inputs, in a process of its own.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attention import check_output, positive, save
from cases import Case, Prepared, Shape, inputs, our_cases, prepare
from measuring import Group, peak_in_child, rounds
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.bench.records import machine
from subquad.kernels.cpu import library

NAMES = ("favor", "linear")
MODES = ("forward", "forward+backward")
HEAD_DIM = 64
HEADS = {8: 1, 3: 1, 1: 4}  # number of heads: times the tokens of the others, so that there is enough to do
TOKENS = 16_384
LENGTHS = [1_024, 16_384, 131_072, 1_048_576]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=positive, default=TOKENS, help=f"tokens where threads are compared, default {TOKENS}")
    add("--lengths", type=positive, nargs="+", default=LENGTHS, help="tokens of one head, default 1024 to 1048576")
    add("--repeats", type=positive, default=5, help="samples of each time, default 5")
    add("--output", type=Path, help="JSON file for the records")
    options = parser.parse_args()
    check_output(parser, options.output)
    if not library.AVAILABLE:
        parser.error(f"there is no native engine to measure: {library.WHY_MISSING}")
    if torch.get_num_threads() == 1:
        parser.error("there is one thread only: OMP_NUM_THREADS says how many torch uses")
    cases = [case for case in our_cases()[0] if case.name in NAMES]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("", total=len(cases) * (len(HEADS) * 2 * len(MODES) + len(options.lengths)))
        tell = partial(progress.update, task, advance=1)
        threads = [r for case in cases for r in over_threads(case, options, lambda s: tell(description=s))]
        lengths = [r for case in cases for r in over_lengths(case, options, lambda s: tell(description=s))]
    report = {"machine": machine(), "repeats": options.repeats, "threads": threads, "lengths": lengths}
    show(Console(), threads, lengths)
    if options.output:
        save(report, options.output)


def over_threads(case: Case, options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict]:
    """All threads against one."""
    most, records = torch.get_num_threads(), []
    for (heads, times), causal, mode in itertools.product(HEADS.items(), (True, False), MODES):
        tell(f"{case.name}, {heads} heads, {mode}")
        shape = Shape(heads, times * options.tokens, HEAD_DIM)
        call = prepare(case, mode, causal, shape, inputs(shape)).call
        ready = {name: Prepared(partial(with_threads, n, call)) for name, n in (("one", 1), ("all", most))}
        for prepared in ready.values():
            prepared.call()
        timings = rounds(ready, options.repeats, lambda _: None)
        record = {"mechanism": case.name, "heads": heads, "tokens": shape.length, "mode": mode, "causal": causal}
        record |= {f"{name}_seconds": list(timing.samples) for name, timing in timings.items()}
        records.append(record | {"times_faster": timings["one"].best / timings["all"].best})
    torch.set_num_threads(most)
    return records


def with_threads(count: int, call: Callable[[], object]) -> None:
    torch.set_num_threads(count)
    call()


def over_lengths(case: Case, options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict]:
    """Time per token of one head; memory of the longest."""
    records = []
    for length in sorted(options.lengths):
        tell(f"{case.name}, {length:,} tokens")
        shape = Shape(1, length, HEAD_DIM)
        ready = {case.name: prepare(case, "forward+backward", True, shape, inputs(shape))}
        ready[case.name].call()
        timing = rounds(ready, options.repeats, lambda _: None)[case.name]
        record = {"mechanism": case.name, "tokens": length, "samples": list(timing.samples)}
        record["microseconds_per_token"] = 1e6 * timing.best / length
        if length == max(options.lengths):
            del ready  # the process that measures has inputs of its own
            record["peak_bytes"] = peak_in_child(case.name, Group("forward+backward", True, shape))
        records.append(record)
    return records


def show(console: Console, threads: list[dict], lengths: list[dict]) -> None:
    table = Table("", "heads", "tokens", "direction", "mode", "one thread, ms", "all, ms", "times faster")
    for r in threads:
        direction = "causal" if r["causal"] else "bidirectional"
        times = (f"{1e3 * min(r[which]):,.1f}" for which in ("one_seconds", "all_seconds"))
        cells = (str(r["heads"]), f"{r['tokens']:,}", direction, r["mode"], *times, f"{r['times_faster']:.2f}")
        table.add_row(r["mechanism"], *cells)
    console.print(table)
    table = Table("", "tokens", "us per token", "peak MB above the inputs")
    for r in lengths:
        peak = f"{r['peak_bytes'] / 1e6:,.0f}" if r.get("peak_bytes") else "-"
        table.add_row(r["mechanism"], f"{r['tokens']:,}", f"{r['microseconds_per_token']:.2f}", peak)
    console.print(table)


if __name__ == "__main__":
    main()
