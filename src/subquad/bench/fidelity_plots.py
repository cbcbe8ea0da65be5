"""Pictures of how well features do. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad import files
from subquad.bench.fidelity import Record
from subquad.checks import diagnostics as checks
from subquad.checks import needs

COLORS = {
    "positive": "tab:blue",
    "hyperbolic": "tab:cyan",
    "trigonometric": "tab:red",
    "optimal": "tab:olive",
    "sharp": "tab:orange",
    "calibrated": "tab:green",
    "balanced": "tab:brown",
    "hedgehog": "tab:purple",
    "exponential": "tab:pink",
}
NAMES = {
    "positive": "positive (FAVOR+)",
    "optimal": "optimal (FAVOR++)",
    "sharp": "sharp (FAVOR#)",
    "balanced": "calibrated, transformed",
    "hedgehog": "learned (Hedgehog)",
    "exponential": "learned exponential",
}
COUPLINGS = {"iid": ":", "orthogonal": "-", "simplex": "--", "hadamard": "-."}
BASELINES = {"uniform": ("average of all values", "black"), "window": ("near blocks and sinks only", "grey")}


def plot_couplings(records: Sequence[Record], titles: Mapping[str, str], path: Path) -> None:
    """Positive and trigonometric features with every coupling, no near blocks: a panel for each input."""
    chosen = [r for r in records if not r.near and r.estimator in ("positive", "trigonometric", *BASELINES)]
    _panels(chosen, titles, path, "Rows drawn independently or coupled, no near blocks", by_coupling=True)


def plot_estimators(records: Sequence[Record], titles: Mapping[str, str], path: Path, *, near: bool) -> None:
    """All estimators with the orthogonal (or only) coupling: a panel for each input."""
    here = [r for r in records if bool(r.near) == near]
    couplings = {r.coupling for r in here if r.coupling}
    kept = "orthogonal" if "orthogonal" in couplings else min(couplings, default="")
    chosen = [r for r in here if r.coupling in ("", kept)]
    how = "near blocks and four sinks exact" if near else "no near blocks, no sinks"
    _panels(chosen, titles, path, f"Error of the output over the number of features, {how}", by_coupling=False)


def _panels(records: Sequence[Record], titles: Mapping[str, str], path: Path, title: str, *, by_coupling: bool) -> None:
    with needs("matplotlib", "bench fidelity"):
        from matplotlib.figure import Figure

    inputs = list(dict.fromkeys(r.input for r in records))
    columns = min(3, len(inputs))
    rows = -(-len(inputs) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.5 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, name in zip(grid, inputs, strict=False):
        _curves(axes, [r for r in records if r.input == name], by_coupling)
        axes.set_title(titles.get(name, name), fontsize="small")
    for axes in grid[len(inputs) :]:
        axes.set_axis_off()
    lines: dict[str, Any] = {}
    for axes in grid:
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    with checks.writable(path):
        files.save_figure(figure, path)


def _curves(axes: Any, records: Sequence[Record], by_coupling: bool) -> None:
    """Error bars are one standard error over draws."""
    curves: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        curves.setdefault((record.estimator, record.coupling), []).append(record)
    for (estimator, coupling), points in curves.items():
        if estimator in BASELINES:
            label, color = BASELINES[estimator]
            axes.axhline(points[0].mean, color=color, linewidth=1, linestyle=(0, (1, 2)), label=label)
            continue
        points = sorted(points, key=lambda r: r.num_features)
        style = {"color": COLORS[estimator], "linestyle": COUPLINGS[coupling] if by_coupling else "-"}
        name = NAMES.get(estimator, estimator)
        axes.errorbar(
            [r.num_features for r in points],
            [r.mean for r in points],
            yerr=[r.se_draws for r in points],
            **style,
            marker="o",
            markersize=3,
            linewidth=1.3,
            label=f"{name}, {coupling}" if by_coupling else name,
        )
    ticks = sorted({r.num_features for r in records if r.num_features})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("features")
    axes.set_ylabel("relative error")
    top = _error_scale(axes, [r.mean for r in records])
    outside = [
        name for name in COLORS if (lowest := [r.mean for r in records if r.estimator == name]) and min(lowest) > top
    ]
    if outside:
        note = f"above the picture: {', '.join(outside)}"
        axes.text(0.5, 0.96, note, transform=axes.transAxes, ha="center", va="top", fontsize="small")


def _error_scale(axes: Any, means: Sequence[float]) -> float:
    """Logarithmic; features that fail by orders of magnitude leave through the top instead of flattening the rest."""
    axes.set_yscale("log")
    low = min(means) / 1.3
    top = min(max(means) * 1.3, max(12.0, 2 * low))
    axes.set_ylim(low, top)
    ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if low <= t <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    return top


def plot_maps(maps: Mapping[str, Tensor], title: str, path: Path) -> None:
    """Attention matrices side by side, on the colours of the first."""
    with needs("matplotlib", "bench fidelity"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3 * len(maps), 3.8), layout="constrained")
    grid = figure.subplots(1, len(maps), squeeze=False)[0]
    top = float(next(iter(maps.values())).flatten().quantile(0.995))
    for axes, (name, matrix) in zip(grid, maps.items(), strict=True):
        axes.imshow(matrix.numpy(), vmin=0, vmax=top, cmap="magma", interpolation="nearest")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("key")
    grid[0].set_ylabel("query")
    figure.colorbar(grid[0].images[0], ax=grid, shrink=0.75, extend="max")
    figure.suptitle(title)
    with checks.writable(path):
        files.save_figure(figure, path)
