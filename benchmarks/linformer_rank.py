"""How far Linformer with a Gaussian projection is from exact attention, over the rank: Theorem 1, and what is used.

    python benchmarks/linformer_rank.py

Two estimates of P v, P = softmax(q k^T / sqrt(D)), from the same matrix E with entries N(0, 1 / rank):

    P E^T (E v)                       of Theorem 1; it needs P, so it is quadratic
    softmax(q (E k)^T / sqrt(D)) E v  what Linformer computes
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad import LinformerAttention, SoftmaxAttention
from subquad.files import save_figure, write_text

LENGTH, HEAD_DIM = 1024, 64
RANKS = (16, 32, 64, 128, 256, 512, 1024)
# Size of the logits, and the mean that all values have in common.
CASES = {
    "diffuse attention, values of mean 0": (1.0, 0.0),
    "peaked attention, values of mean 0": (6.0, 0.0),
    "diffuse attention, values of mean 3": (1.0, 3.0),
}
THEOREM, USED = "P EᵀE v (Theorem 1)", "softmax(q (E k)ᵀ) E v (Linformer)"
LAW = "sqrt((|P|²|v|²/|P v|² + 1) / rank)"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Error of Gaussian Linformer against its rank.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for linformer_rank.json and .png")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    cases = {name: errors(*case, options.ranks, options.draws) for name, case in CASES.items()}
    about = {"length": LENGTH, "head_dim": HEAD_DIM, "draws": options.draws}
    write_text(options.output / "linformer_rank.json", json.dumps({**about, "cases": cases}, indent=1) + "\n")
    draw(cases, options.output / "linformer_rank.png")
    for name, rows in cases.items():
        print(name)
        for row in rows:
            cells = (f"{label} {row[label]['mean']:.3f} ± {row[label]['spread']:.3f}" for label in (THEOREM, USED))
            print(f"  rank {row['rank']:5d}: ", ", ".join(cells), f", {LAW} {row[LAW]:.3f}")


def errors(size: float, mean: float, ranks: list[int], draws: int) -> list[dict[str, Any]]:
    """Mean and standard deviation over draws of |estimate - P v| / |P v|, for each rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, LENGTH, HEAD_DIM, generator=generator, dtype=torch.float64)
    q, v = size * q, v + mean
    p = SoftmaxAttention(HEAD_DIM).attention_matrix(q, k)
    exact = p @ v
    rows = []
    for rank in ranks:
        attention = LinformerAttention(HEAD_DIM, rank, max_length=LENGTH, projection="gaussian", sharing="key_value")
        found: dict[str, list[Tensor]] = {THEOREM: [], USED: []}
        for seed in range(draws):
            attention.redraw(seed)
            e = torch.as_tensor(attention.weight)[0, 0].double()
            for label, estimate in ((THEOREM, (p @ e.mT) @ (e @ v)), (USED, attention(q, k, v))):
                found[label].append((estimate - exact).norm() / exact.norm())
        law = ((p.norm() ** 2 * v.norm() ** 2 / exact.norm() ** 2 + 1) / rank) ** 0.5
        rows.append({"rank": rank, **{label: summary(values) for label, values in found.items()}, LAW: float(law)})
    return rows


def summary(values: list[Tensor]) -> dict[str, float]:
    every = torch.stack(values)
    return {"mean": float(every.mean()), "spread": float(every.std())}


def draw(cases: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(cases), figsize=(13, 4.4), sharey=True, squeeze=False)
    for axis, (name, rows) in zip(axes[0], cases.items(), strict=True):
        ranks = [row["rank"] for row in rows]
        for label, marker in ((THEOREM, "o"), (USED, "s")):
            mean, spread = ([row[label][key] for row in rows] for key in ("mean", "spread"))
            axis.errorbar(ranks, mean, yerr=spread, marker=marker, capsize=3, label=label)
        axis.plot(ranks, [row[LAW] for row in rows], "k--", linewidth=1, label=LAW)
        axis.axhline(1, color="grey", linewidth=0.8, linestyle=":", label="zeros instead of attention")
        axis.set(title=name, xlabel="rank", xscale="log", yscale="log", xticks=ranks, xticklabels=map(str, ranks))
        axis.minorticks_off()
    axes[0][0].set_ylabel("|estimate - P v| / |P v|")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(
        f"Gaussian projection, {LENGTH} tokens, heads of {HEAD_DIM}: mean and standard deviation over draws"
    )
    figure.tight_layout()
    save_figure(figure, path, dpi=120)


if __name__ == "__main__":
    main()
