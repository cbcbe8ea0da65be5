"""What pictures show, as text: `pictures.txt`. Run as a script, this file writes it anew, for somebody to read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from subquad.bench import DecodeCost, Timing
from subquad.bench.fidelity import Record
from subquad.bench.fidelity_plots import plot_couplings, plot_estimators, plot_maps
from subquad.cli.demo import CONTEXTS
from subquad.cli.demo import _plot as plot_demonstration
from subquad.diagnostics import Diagnosis, HeadDiagnosis, LayerDiagnosis, SpectrumResult
from subquad.diagnostics.verdicts import CALIBRATE, FINE, SHARP
from subquad.training.metrics import MetricsFile, plot_losses

EXPECTED = Path(__file__).parent / "pictures.txt"

# A figure as text -----------------------------------------------------------------------------------------------------


def numbers(values: Any) -> str:
    return " ".join(f"{value:.4g}" for value in np.asarray(values, float).flatten())


def text_of(figure: Figure) -> Iterator[str]:
    yield f"figure of {numbers(figure.get_size_inches())} inches: {figure.get_suptitle()!r}"
    for legend in figure.legends:
        yield f"  legend: {', '.join(text.get_text() for text in legend.get_texts())}"
    for axes in figure.axes:
        if axes.get_label() == "<colorbar>":
            yield f"  bar of colours from {numbers(axes.get_ylim())}"
            continue
        yield f"  axes {axes.get_title()!r}, {axes.get_xlabel()!r}, {axes.get_ylabel()!r}" if axes.axison else "  empty"
        yield from (f"    {line}" for line in _content(axes) if axes.axison)


def _content(axes: Any) -> Iterator[str]:
    for name in ("x", "y"):
        axis = getattr(axes, f"{name}axis")
        yield f"{name}: {axis.get_scale()} from {numbers(axis.get_view_interval())}"
        if isinstance(axis.get_major_locator(), FixedLocator):  # not what matplotlib chose
            places = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            ticks = ", ".join(f"{place:.4g} {label.get_text()!r}" for place, label in places)
            yield f"{name} ticks, {len(axis.get_ticklocs(minor=True))} between: {ticks}"
    for line in axes.get_lines():
        look = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_marker()} {line.get_alpha()}"
        yield f"line {line.get_label()!r}, {look}: {numbers(line.get_xdata())}; {numbers(line.get_ydata())}"
    for bars in axes.collections:
        if hasattr(bars, "get_segments"):
            yield f"segments: {'; '.join(numbers(segment) for segment in bars.get_segments())}"
    for bar in axes.patches:
        yield f"bar: {numbers([*bar.get_xy(), bar.get_width(), bar.get_height()])}"
    for image in axes.get_images():
        yield f"image in {image.cmap.name} {numbers(image.get_clim())}: {numbers(image.get_array().filled(np.nan))}"
    for text in axes.texts:
        yield f"text at {numbers(text.get_position())} in {text.get_color()}: {text.get_text()!r}"
    if axes.get_legend() is not None:
        yield f"legend: {', '.join(text.get_text() for text in axes.get_legend().get_texts())}"


# Figures of made-up numbers -------------------------------------------------------------------------------------------


def record(name: str, estimator: str, coupling: str, features: int, mean: float, near: int = 0) -> Record:
    return Record(name, near, 0, estimator, coupling, features, 2, 3, mean, 0.02, 0.01, (mean,) * 3)


RECORDS = [
    *(record(name, "positive", c, m, 8 / m) for name in "abcd" for c in ("iid", "orthogonal") for m in (128, 64)),
    *(record("a", "sharp", "", m, 2 / m) for m in (64, 128)),
    record("a", "positive", "orthogonal", 64, 0.02, near=64),
    *(record("b", "trigonometric", "simplex", m, 9000 / m) for m in (64, 128)),
    *(record(name, "uniform", "", 0, 0.7) for name in "abcd"),
    record("b", "window", "", 0, 0.3),
]
TITLES = {"a": "the first", "b": "the second"}


def head(error: float, near: float | None, verdict: str) -> HeadDiagnosis:
    return HeadDiagnosis(1.0, 1.0, -1.0, 1.0, 3 * error, error, 0.4, near, None, None, verdict)


def diagnosis(*rows: list[HeadDiagnosis], tolerance: float = 0.6) -> Diagnosis:
    names = [f"layers.{number}.attention" for number in range(len(rows))]
    made = zip(names, rows, strict=True)
    layers = tuple(LayerDiagnosis(n, True, "positive", 8, 4, 4, False, tuple(r)) for n, r in made)
    return Diagnosis(tolerance, 64, 1, layers)


NARROW = diagnosis([head(0.1, 0.2, FINE), head(0.9, 0.8, CALIBRATE)], [head(0.5, None, SHARP)])
WIDE = diagnosis([head(0.01 * n, 0.3, FINE) for n in range(9)], [head(0.2, 0.3, FINE)])
STRICT = diagnosis([head(0.1, 0.2, FINE)], tolerance=0.2)  # colours still reach an error of 1
MANY = diagnosis(*[[head(0.1, 0.2, FINE)] * 15] * 14)

SPECTRUM = SpectrumResult(torch.linspace(0.2, 1, 8).expand(3, 2, 8) ** torch.tensor([[[1.0]], [[0.8]], [[0.5]]]), 1)
LOSSES = {
    "favor": [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "eval_loss": 3.2},
        {"step": 4, "eval_loss": 2},
    ],
    "softmax": [{"step": 1, "loss": 8.0}, {"step": 2, "eval_loss": 2.5}],
}
COSTS = {
    name: [DecodeCost(size, Timing((factor, 9 * factor, factor)), 7) for size in CONTEXTS]
    for name, factor in (("favor", 0.001), ("softmax", 0.002))
}


def plot_demo(folder: Path) -> None:
    for name, records in LOSSES.items():
        (folder / name).mkdir()
        for line in records:
            MetricsFile(folder / name).append(line)
    plot_demonstration(folder, {name: {"unigram_loss": 2.9} for name in LOSSES}, COSTS)


PICTURES: dict[str, Callable[[Path], object]] = {
    "couplings": lambda folder: plot_couplings(RECORDS, TITLES, folder / "a.png"),
    "estimators": lambda folder: plot_estimators(RECORDS, TITLES, folder / "a.png", near=False),
    "estimators with near blocks": lambda folder: plot_estimators(RECORDS, TITLES, folder / "a.png", near=True),
    "maps": lambda folder: plot_maps(
        {"exact": torch.arange(4.0).view(2, 2), "features": torch.ones(2, 2)}, "two maps", folder / "a.png"
    ),
    "spectrum": lambda folder: SPECTRUM.plot(folder / "a.png", title="a model"),
    "spectrum with control": lambda folder: SPECTRUM.plot(folder / "a.png", control=SPECTRUM),
    "diagnosis": lambda folder: NARROW.plot(folder / "a.png", title="a model"),
    "diagnosis of one head": lambda folder: STRICT.plot(folder / "a.png"),
    "diagnosis of many heads": lambda folder: WIDE.plot(folder / "a.png"),
    "diagnosis of many layers": lambda folder: MANY.plot(folder / "a.png"),
    "losses": lambda folder: plot_losses(LOSSES, folder / "a.png", unigram=2.9, unit="residue"),
    "losses without unigram": lambda folder: plot_losses(
        {"favor": LOSSES["favor"][:3]}, folder / "a.png", unigram=None, unit="byte"
    ),
    "demo": plot_demo,
}


def text_of_picture(draw: Callable[[Path], object], folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """What is saved, at the moment when it is; the file must be there afterwards."""
    saved: list[list[str]] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        saved.append([f"{kwargs.get('dpi')} dots per inch", *text_of(figure)])

    with patch.context() as patched:
        patched.setattr(Figure, "savefig", savefig)
        draw(folder)
    assert len(saved) == 1
    assert next(folder.glob("*.png")).stat().st_size > 1000
    return saved[0]


@pytest.mark.parametrize("name", PICTURES)
def test_what_pictures_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = EXPECTED.read_text().split("\n\n")
    expected = dict(section.strip().split("\n", 1) for section in sections)
    assert text_of_picture(PICTURES[name], tmp_path, monkeypatch) == expected[f"== {name}"].splitlines()


if __name__ == "__main__":
    written = []
    for name, draw in PICTURES.items():
        with TemporaryDirectory() as folder:
            written.append("\n".join([f"== {name}", *text_of_picture(draw, Path(folder), pytest.MonkeyPatch())]))
    EXPECTED.write_text("\n\n".join(written) + "\n")
