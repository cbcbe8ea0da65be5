"""What other load on the cores costs: training and decoding, alone and beside busy loops, by how threads wait.

    python benchmarks/busy.py --loops 6 --output busy.json

Each sample is a process of its own, because torch reads the policy once: "torch's own" leaves it alone, "command" is
what the `subquad` command chooses, "one thread" cannot wait for others. Policies take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

POLICIES = {
    "torch's own": {},
    "command": {"OMP_WAIT_POLICY": "passive"},  # as in subquad/waiting.py
    "one thread": {"OMP_NUM_THREADS": "1"},
}
WORK = ("training", "decoding", "attention")
SECONDS = 4.0


def training(seconds: float) -> float:
    """Tokens per second of a small causal model."""
    import torch

    from subquad.models import SubquadConfig, SubquadForCausalLM

    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=32, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, attention="favor", causal=True
    )
    model = SubquadForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(32, (4, 512))

    def step() -> int:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return tokens.numel()

    return _rate(step, seconds)


def decoding(seconds: float) -> float:
    """Steps per second of one FAVOR layer."""
    import torch

    from subquad import FavorAttention

    attention = FavorAttention(64)
    q, k, v = torch.randn(3, 1, 8, 300, 64)
    with torch.no_grad():
        state = attention.extend(q, k, v)[1]
        q, k, v = (t[:, :, :1] for t in (q, k, v))

        def step() -> int:
            nonlocal state
            state = attention.extend(q, k, v, state)[1]
            return 1

        return _rate(step, seconds)


def attention(seconds: float) -> float:
    """Tokens per second of one FAVOR layer, forward and backward."""
    import torch

    from subquad import FavorAttention

    attention = FavorAttention(64)
    q, k, v = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))

    def step() -> int:
        out = attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return q.shape[2]

    return _rate(step, seconds)


def _rate(step: Callable[[], int], seconds: float) -> float:
    step()
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        done += step()
    return done / (time.perf_counter() - begun)


def sample(work: str, policy: str, seconds: float) -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))} | POLICIES[policy]
    command = [sys.executable, __file__, "--child", work, "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def busy_loops(count: int) -> list[subprocess.Popen]:
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]


def measure(loops: int, repeats: int, seconds: float) -> list[dict]:
    """One record for each kind of work and policy: all samples, in units per second."""
    from rich.progress import track

    samples: dict[tuple[str, str], list[float]] = {}
    running = busy_loops(loops)
    todo = list(product(range(repeats), WORK, POLICIES))
    try:
        for _, work, policy in track(todo, f"beside {loops} busy loops"):
            samples.setdefault((work, policy), []).append(sample(work, policy, seconds))
    finally:
        for loop in running:
            loop.kill()
    return [{"work": w, "policy": p, "loops": loops, "per_second": s} for (w, p), s in samples.items()]


def show(records: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "policy", "busy loops", "per second (median)", "of one's own on an idle machine")
    idle = {(r["work"], r["policy"]): statistics.median(r["per_second"]) for r in records if not r["loops"]}
    for r in records:
        rate = statistics.median(r["per_second"])
        share = rate / idle[r["work"], r["policy"]]
        table.add_row(r["work"], r["policy"], str(r["loops"]), f"{rate:,.0f}", f"{share:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, nargs="+", default=[2, 6], help="busy processes beside, default 2 and 6")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each, default 3")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each sample, default {SECONDS:g}")
    parser.add_argument("--output", type=Path, help="JSON file for the records")
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(globals()[options.child](options.seconds))
        return
    from attention import check_output, save

    from subquad.bench.records import machine

    check_output(parser, options.output)
    records = [r for loops in (0, *options.loops) for r in measure(loops, options.repeats, options.seconds)]
    show(records)
    if options.output:
        save({"machine": machine(), "seconds": options.seconds, "records": records}, options.output)


if __name__ == "__main__":
    main()
