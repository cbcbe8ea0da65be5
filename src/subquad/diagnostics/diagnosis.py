"""What `diagnose` found, as numbers, text, a table, a file and a picture."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from subquad import files
from subquad.checks import diagnostics as checks
from subquad.checks import needs
from subquad.diagnostics.far_field import FarField
from subquad.diagnostics.verdicts import CALIBRATE, FINE, SHARP, SHORT, VERDICTS

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {FINE: "green", CALIBRATE: "yellow", SHARP: "red"}
COLUMNS = ("layer", "head", "|q|", "|k|", "logits", "entropy", "error", "uniform", "near", "fitted", "features")
LEGEND = (
    "|q|, |k|: mean norms of sqrt(scale) q and sqrt(scale) k. logits: least and largest. entropy: of exact attention, "
    "nats. error: of the output, relative to exact attention; of the mean of all values (uniform), of near blocks and "
    "sinks alone (near), of a calibrated draw (fitted). features: how many do the work, of how many. too sharp: for "
    "random features; keep exact attention there, or learn the features."
)


@dataclass(frozen=True)
class HeadDiagnosis:
    """One head. Norms and logits are those of x = sqrt(scale) q and y = sqrt(scale) k; errors are relative to the
    output of exact attention.

    entropy: of exact attention, nats, mean over rows.
    error: of the features. uniform_error: of the mean of all visible values. near_error: of exact attention within near
        blocks (of 64 tokens if the layer has none) and sinks alone; None in cross-attention.
    effective_features: how many features carry the far field; None if there is none, or for signed features.
    calibrated_error: of a calibrated draw, on the half of the sequences that it was not fitted to; None if not tried.
    """

    query_norm: float
    key_norm: float
    logit_min: float
    logit_max: float
    entropy: float
    error: float
    uniform_error: float
    near_error: float | None
    effective_features: float | None
    calibrated_error: float | None
    verdict: str


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer, judged with these features. own: they are the layer's, not a stand-in for exact attention.

    settled: they have been calibrated or learned. far_share, far_loss: how much the layer's output and the model's loss
    change without its far field; None for exact attention, where all is exact, or for models without a loss.
    """

    name: str
    own: bool
    estimator: str
    num_features: int
    near: int
    sinks: int
    settled: bool
    heads: tuple[HeadDiagnosis, ...]
    far_share: float | None = None
    far_loss: float | None = None

    @property
    def verdict(self) -> str:
        """That of the worst head."""
        return max((head.verdict for head in self.heads), key=VERDICTS.index)


@dataclass(frozen=True)
class Diagnosis:
    """All recorded layers. rows: queries of each of the `sequences` that were compared with exact attention."""

    tolerance: float
    rows: int
    sequences: int
    layers: tuple[LayerDiagnosis, ...]

    def count(self, verdict: str) -> int:
        """Heads of which this is the verdict."""
        return sum(head.verdict == verdict for layer in self.layers for head in layer.heads)

    @property
    def summary(self) -> str:
        """How many heads are what."""
        total = sum(len(layer.heads) for layer in self.layers)
        parts = [f"{self.count(v)} {words}" for v, words in zip(VERDICTS, _SUMMARY, strict=True) if self.count(v)]
        far = any(head.effective_features is not None for layer in self.layers for head in layer.heads)
        signed = any(layer.estimator == "trigonometric" for layer in self.layers)
        note = "" if far or signed else "; all is exact, no sequence reaches beyond near blocks and sinks"
        return f"{total} heads, tolerance {self.tolerance:g}: {', '.join(parts)}{note}"

    @property
    def far_field(self) -> str:
        """What far fields contribute, layer by layer; empty where there is none."""
        found = [
            FarField(name, layer.far_share, layer.far_loss)
            for name, layer in zip(short_names(self), self.layers, strict=True)
            if layer.far_share is not None
        ]
        lines = [f"  {far.words}{': contributes nothing' if far.idle else ''}" for far in found]
        return "\n".join(["far field:", *lines]) if lines else ""

    def save(self, path: str | Path) -> None:
        """As JSON."""
        with checks.writable(Path(path)):
            files.write_text(path, json.dumps({**asdict(self), "summary": self.summary}, indent=1) + "\n")

    def plot(self, path: str | Path, *, title: str = "") -> None:
        """Heat maps, layers by heads: error of the features, of the better baseline, entropy."""
        from subquad.diagnostics.heat_maps import plot_diagnosis

        plot_diagnosis(self, Path(path), title)

    def table(self) -> "Table":
        """For a rich console."""
        with needs("rich", "Diagnosis.table"):
            from rich import box
            from rich.table import Table
            from rich.text import Text

        look = {
            "box": box.SIMPLE_HEAD,
            "padding": 0,
            "pad_edge": False,
            "title_justify": "left",
            "caption_justify": "left",
        }
        table = Table(title=self.summary, caption=LEGEND, **look)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
        table.add_column("verdict", min_width=max(map(len, CALIBRATE.split())))
        for *cells, verdict in self._rows():
            table.add_row(*cells, Text(SHORT[verdict], COLORS[verdict]))
        return table

    def __str__(self) -> str:
        rows = [(*COLUMNS, "verdict"), *((*cells, SHORT[verdict]) for *cells, verdict in self._rows())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *cells, verdict in rows:
            aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True))
            lines.append("  ".join([f"{name:{widths[0]}}", *aligned, verdict]))
        return "\n".join(filter(None, [self.summary, *lines, LEGEND, self.far_field]))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of each head, its verdict at the end; a layer is named in its first row."""
        for name, layer in zip(short_names(self), self.layers, strict=True):
            for number, head in enumerate(layer.heads):
                yield ("" if number else name, str(number), *_cells(head, layer.num_features), head.verdict)


_SUMMARY = (
    "fine",
    "in need of calibration (subquad.calibrate)",
    "too sharp for random features (keep exact attention there, or learn the features)",
)


def _cells(head: HeadDiagnosis, num_features: int) -> tuple[str, ...]:
    used = head.effective_features
    return (
        _size(head.query_norm),
        _size(head.key_norm),
        f"{_size(head.logit_min)} to {_size(head.logit_max)}",
        f"{head.entropy:.2f}",
        *(_error(x) for x in (head.error, head.uniform_error, head.near_error, head.calibrated_error)),
        "-" if used is None else f"{used:.1f}/{num_features}",
    )


def _size(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def short_names(result: Diagnosis) -> list[str]:
    """Names of the layers without what all of them begin and end with, but for one word: layers.0, layers.1, ..."""
    parts = [layer.name.split(".") for layer in result.layers]
    if len(parts) == 1:
        return [result.layers[0].name]
    shortest = min(map(len, parts))
    begin = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    end = next((i for i in range(shortest - begin) if len({p[-1 - i] for p in parts}) > 1), 0)
    return [".".join(p[max(0, begin - 1) : len(p) - end]) for p in parts]
