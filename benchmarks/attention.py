"""Time and memory of every mechanism against exact attention, in one run: `make bench`.

Each case is checked against the dense definition before it is timed; nothing is printed for a wrong result.
"""

import argparse
import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import subquad
from subquad.bench import peak_memory, time_side_by_side
from subquad.testing import relative_error

CASES: dict[str, dict] = {mechanism.name: {} for mechanism in subquad.MECHANISMS}
CASES["favor-paper"] = {"near": 0, "sinks": 0}


def make(name: str, head_dim: int) -> subquad.Mechanism:
    return subquad.attention(name.split("-")[0], head_dim=head_dim, **CASES[name])


def inputs(heads: int, length: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3)]


def gate(name: str, head_dim: int, causal: bool) -> None:
    """Stops the benchmark if the fast way is not the definition."""
    q, k, v = inputs(1, 300, head_dim)
    mechanism = make(name, head_dim)
    want = mechanism.reference(q.double(), k.double(), v.double(), causal=causal)
    error = relative_error(mechanism(q, k, v, causal=causal), want)
    if not error < 1e-5:
        sys.exit(f"{name} is wrong (relative error {error:.1e}); not timed")


def case(name: str, mode: str, tensors: list[Tensor], causal: bool):
    mechanism = make(name, tensors[0].shape[-1])
    if mode == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return mechanism(*tensors, causal=causal)

        return forward
    leaves = [t.requires_grad_() for t in tensors]
    direction = torch.ones_like(tensors[2])

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(mechanism(*leaves, causal=causal), leaves, direction, allow_unused=True)

    return forward_backward


def gemm_rate() -> float:
    """GFLOP/s of a large matrix product: what this machine can do at most."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / time_side_by_side({"gemm": lambda: a @ a}, repeats=5)["gemm"].best / 1e9


def measure(name: str, options: argparse.Namespace, length: int, mode: str, causal: bool) -> int | None:
    """Peak memory in a process of its own."""
    flags = [f"--peak={name}", f"--heads={options.heads}", f"--head-dim={options.head_dim}", f"--lengths={length}"]
    command = [sys.executable, __file__, *flags, f"--mode={mode}", *(["--causal"] if causal else [])]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[1024, 4096, 16384], help="sequence lengths")
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--skip-memory", action="store_true", help="time only, which is quicker")
    parser.add_argument("--output", type=Path, help="write the records to this JSON file")
    parser.add_argument("--peak", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="forward", help=argparse.SUPPRESS)
    parser.add_argument("--causal", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output and not options.output.parent.is_dir():  # now, not after minutes of measuring
        parser.error(f"--output: there is no folder {options.output.parent}")
    if options.peak:
        tensors = inputs(options.heads, options.lengths[0], options.head_dim)
        small = [t[:, :, :512].clone() for t in tensors]
        case(options.peak, options.mode, small, options.causal)()  # load what is loaded once
        print(json.dumps(peak_memory(case(options.peak, options.mode, tensors, options.causal))))
        return
    run(options)


def run(options: argparse.Namespace) -> None:
    console = Console()
    records = []
    cases = [(m, c, n) for m in ("forward", "forward+backward") for c in (False, True) for n in options.lengths]
    for name in CASES:
        for causal in (False, True):
            gate(name, options.head_dim, causal)
    for mode, causal, length in track(cases, description="measuring", console=console, transient=True):
        tensors = inputs(options.heads, length, options.head_dim)
        calls = {name: case(name, mode, [t.clone() for t in tensors], causal) for name in CASES}
        for name, timing in time_side_by_side(calls, options.repeats).items():
            peak = None if options.skip_memory else measure(name, options, length, mode, causal)
            record = {"mechanism": name, "mode": mode, "causal": causal, "length": length}
            records.append(record | {"best": timing.best, "median": timing.median, "peak_bytes": peak})
    machine = {"threads": torch.get_num_threads(), "gemm_gflops": gemm_rate(), "processor": platform.machine()}
    machine |= {"torch": torch.__version__, "commit": commit(), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    machine |= {"heads": options.heads, "head_dim": options.head_dim, "num_features": 256}
    show(console, machine, records)
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "records": records}, indent=1) + "\n")


def show(console: Console, machine: dict, records: list[dict]) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), style="dim")
    exact = {(r["mode"], r["causal"], r["length"]): r["best"] for r in records if r["mechanism"] == "softmax"}
    table = Table("", "", "length", "mechanism", "best ms", "median", "x exact", "peak MB")
    for r in records:
        ratio = exact[r["mode"], r["causal"], r["length"]] / r["best"]
        direction = "causal" if r["causal"] else "full"
        mode = "fwd" if r["mode"] == "forward" else "fwd+bwd"
        peak = "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.0f}"
        times = f"{1e3 * r['best']:.1f}", f"{1e3 * r['median']:.1f}", f"{ratio:.2f}"
        table.add_row(mode, direction, f"{r['length']:,}", r["mechanism"], *times, peak)
    console.print(table)


if __name__ == "__main__":
    main()
