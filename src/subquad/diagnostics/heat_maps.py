"""The picture of a diagnosis. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad import files
from subquad.checks import diagnostics as checks
from subquad.checks import needs
from subquad.diagnostics.verdicts import CALIBRATE, SHARP, SHORT

if TYPE_CHECKING:
    from subquad.diagnostics.diagnosis import Diagnosis, HeadDiagnosis

MARKS = {CALIBRATE: "o", SHARP: "x"}
CELLS_WITH_TEXT = 200  # more would not be legible


def plot_diagnosis(result: "Diagnosis", path: Path, title: str) -> None:
    """Layers from the first at the top, heads from left to right; one scale of colours for both errors."""
    with needs("matplotlib", "Diagnosis.plot"):
        from matplotlib.figure import Figure
    from subquad.diagnostics.diagnosis import short_names

    layers, heads = len(result.layers), max(len(layer.heads) for layer in result.layers)
    width, height = max(3.4, 0.42 * heads + 1.2), max(2.0, 0.34 * layers + 1.0)
    stacked = heads > 1.5 * layers and heads > 8  # side by side would be too wide for a page
    size = (max(5.0, width + 1), 3 * height + 0.6) if stacked else (3 * width, height + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*(3, 1) if stacked else (1, 3))
    errors = [[head.error for head in layer.heads] for layer in result.layers]
    baselines = [[_baseline(head) for head in layer.heads] for layer in result.layers]
    entropies = [[head.entropy for head in layer.heads] for layer in result.layers]
    top = max(1.0, 2 * result.tolerance)
    shown = (
        (errors, "error of the features", {"vmin": 0, "vmax": top, "cmap": "RdYlBu_r"}, "max"),
        (baselines, "error of the better baseline", {"vmin": 0, "vmax": top, "cmap": "RdYlBu_r"}, "max"),
        (entropies, "entropy (nats)", {"vmin": 0, "cmap": "viridis"}, "neither"),
    )
    for ax, (numbers, name, colors, extend) in zip(axes, shown, strict=True):
        image = ax.imshow(_padded(numbers, heads), aspect="auto", **colors)
        ax.set_title(name, fontsize="medium")
        ax.set_xlabel("head" if not stacked or ax is axes[2] else "")
        ax.set_xticks(range(heads))
        ax.set_yticks(range(layers), short_names(result) if stacked or ax is axes[0] else [""] * layers)
        figure.colorbar(image, ax=ax, extend=extend)
        if layers * heads <= CELLS_WITH_TEXT:
            _write(ax, numbers, image)
    _mark(axes[0], result)
    figure.suptitle(f"{title}\n{_legend(result)}".strip(), fontsize="medium")
    with checks.writable(path):
        files.save_figure(figure, path)


def _baseline(head: "HeadDiagnosis") -> float:
    return head.uniform_error if head.near_error is None else min(head.uniform_error, head.near_error)


def _padded(numbers: list[list[float]], heads: int) -> list[list[float]]:
    """Layers with fewer heads than others leave the rest empty."""
    return [[*row, *[float("nan")] * (heads - len(row))] for row in numbers]


def _write(ax: Any, numbers: list[list[float]], image: Any) -> None:
    """Each number in a colour that can be read on its cell."""
    for y, row in enumerate(numbers):
        for x, number in enumerate(row):
            ax.text(x, y, f"{number:.2f}", ha="center", va="center", fontsize=7, color=_ink(image, number))


def _ink(image: Any, number: float) -> str:
    red, green, blue, _ = image.cmap(image.norm(number))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _mark(ax: Any, result: "Diagnosis") -> None:
    """A sign in the corner of heads that are not fine."""
    image = ax.get_images()[0]
    for y, layer in enumerate(result.layers):
        for x, head in enumerate(layer.heads):
            if head.verdict in MARKS:
                place = {"ha": "right", "va": "top", "color": _ink(image, head.error)}
                ax.text(x + 0.44, y - 0.46, MARKS[head.verdict], fontsize=8, fontweight="bold", **place)


def _legend(result: "Diagnosis") -> str:
    found = [f"{mark} {SHORT[verdict]}" for verdict, mark in MARKS.items() if result.count(verdict)]
    return "; ".join([f"tolerance {result.tolerance:g}", *found, *([] if found else ["every head is fine"])])
