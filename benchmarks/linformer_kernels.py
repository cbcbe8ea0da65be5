"""Linformer with the softmax and with the linear kernel, beside linear attention: what it costs and what breaks.

python benchmarks/linformer_kernels.py
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import LinearAttention, LinformerAttention, Mechanism
from subquad.bench import time_side_by_side
from subquad.features.elementwise import elu1
from subquad.files import write_text

HEADS, HEAD_DIM = 8, 64
RESULTS = Path(__file__).parent / "results"
SIGNED: dict[str, dict[str, Any]] = {
    "learned, E and F": {"sharing": "headwise"},
    "learned, E = F": {"sharing": "key_value"},
    "gaussian, E = F": {"sharing": "key_value", "projection": "gaussian"},
    "mean": {"projection": "mean"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and conditioning of Linformer with two kernels.")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-exact", action="store_true", help="without exact attention, which takes longest")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for linformer_kernels.json")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    times = cost(options.length, options.rank, options.repeats, exact=not options.skip_exact)
    sums = {name: row_sums(options.rank, **chosen) for name, chosen in SIGNED.items()}
    report = {"length": options.length, "rank": options.rank, "milliseconds": times, "row sums": sums}
    write_text(options.output / "linformer_kernels.json", json.dumps(report, indent=1) + "\n")
    for name, milliseconds in times.items():
        print(f"{name:38s}", ", ".join(f"{mode} {value:.1f} ms" for mode, value in milliseconds.items()))
    for name, found in sums.items():
        print(f"{name:38s}", ", ".join(f"{what} {value:.3g}" for what, value in found.items()))


def cost(length: int, rank: int, repeats: int, *, exact: bool) -> dict[str, dict[str, float]]:
    """Best times of one call, forward alone and with backward."""
    mechanisms: dict[str, Mechanism] = {
        f"linformer, {kernel}, {name}": LinformerAttention(
            HEAD_DIM, rank, max_length=length, projection=name, kernel=kernel
        )
        for kernel in ("softmax", "linear")
        for name in ("learned", "mean")
    }
    mechanisms |= {"linear": LinearAttention(HEAD_DIM), "linear (torch)": LinearAttention(HEAD_DIM, backend="torch")}
    calls: dict[str, Callable[..., Tensor]] = dict(mechanisms)
    calls |= {"scaled_dot_product_attention": F.scaled_dot_product_attention} if exact else {}
    inputs = [torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)]

    def forward(call: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            call(*inputs)

    def both(call: Callable[..., Tensor]) -> None:
        call(*inputs).sum().backward()

    found: dict[str, dict[str, float]] = {name: {} for name in calls}
    for mode, run in (("forward", forward), ("forward+backward", both)):
        timed = time_side_by_side({name: lambda c=c, run=run: run(c) for name, c in calls.items()}, repeats)
        for name, timing in timed.items():
            found[name][mode] = round(1000 * timing.best, 1)
    return found


def row_sums(rank: int, draws: int = 20, **options: Any) -> dict[str, float]:
    """Had we divided by sum_r phi(q) (E phi(k))_r, or by phi(q) (E phi(k))^T (F 1): how often it is negative, and how
    much larger than the largest value outputs become."""
    length, seen = 4 * rank, {"sum over slots": torch.empty(0), "F applied to ones": torch.empty(0)}
    largest = dict.fromkeys([*seen, "ours"], 0.0)
    generator = torch.Generator().manual_seed(0)
    for seed in range(draws):
        torch.manual_seed(seed)
        attention = LinformerAttention(HEAD_DIM, rank, max_length=length, kernel="linear", **options)
        if attention.weight is not None:
            attention.redraw(seed)
        q, k, v = torch.randn(3, 1, 2, length, HEAD_DIM, generator=generator, dtype=torch.float64)
        e, f, _ = attention._dense_projections(q, torch.ones(1, 1, 1, length, dtype=torch.bool))
        similarity = (elu1(q) @ (e @ elu1(k)).mT).detach()
        numerator = (similarity @ (f @ v)).detach()
        normalisers = {
            "sum over slots": similarity.sum(-1),
            "F applied to ones": (similarity @ f.sum(-1)[..., None])[..., 0],
        }
        for name, normaliser in normalisers.items():
            seen[name] = torch.cat([seen[name], normaliser.detach().flatten()])
            out = (numerator / normaliser.detach()[..., None]).abs().max() / v.abs().max()
            largest[name] = max(largest[name], float(out))
        largest["ours"] = max(largest["ours"], float(attention(q, k, v).detach().abs().max() / v.abs().max()))
    negative = {f"{name}: negative": float((values < 0).double().mean()) for name, values in seen.items()}
    return {**negative, **{f"{name}: largest output": value for name, value in largest.items()}}


if __name__ == "__main__":
    main()
