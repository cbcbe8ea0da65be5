"""What is recorded of a run: JSON lines as they come, a CSV table and a plot from them."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import files
from subquad.checks import runs
from subquad.errors import DamageWarning
from subquad.tables import csv_table
from subquad.training.checksums import write_atomically

COLUMNS = (
    *("step", "epoch", "tokens", "seconds", "loss", "grad_norm", "learning_rate", "tokens_per_second"),
    *("eval_loss", "eval_accuracy", "eval_perplexity", "eval_bits"),
)


def token_statistics(logits: Tensor, labels: Tensor, *, causal: bool) -> Tensor:
    """`[B, 3]`: summed negative log-likelihood, right guesses and targets of each sample; float32, on the device."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    real = labels != -100
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    right = (logits.argmax(-1) == labels) & real
    return torch.stack([losses.view(labels.shape).sum(-1), right.sum(-1).float(), real.sum(-1).float()], -1)


def summary(totals: Tensor) -> dict[str, float]:
    """Loss, accuracy, perplexity and bits per target from summed statistics `[3]`."""
    loss = float(totals[0] / totals[2])
    return {
        "loss": loss,
        "accuracy": float(totals[1] / totals[2]),
        "perplexity": math.exp(min(loss, 700.0)),
        "bits": loss / math.log(2),
    }


class MetricsFile:
    """`metrics.jsonl`, one record per line, flushed at once; `metrics.csv` and `loss.png` are made from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self._told: list[int] = []

    def records(self) -> list[dict[str, Any]]:
        """All whole records. Damaged lines are told once and left out; so is a last line that a kill cut short."""
        if not self.path.exists():
            return []
        with runs.readable_record(self.path):
            lines = self.path.read_bytes().split(b"\n")[:-1]
        found = [_record(line) for line in lines]
        damaged = [number for number, record in enumerate(found, 1) if record is None]
        if damaged and damaged != self._told:
            self._told = damaged
            warnings.warn(runs.damaged_lines(self.path, damaged), DamageWarning, stacklevel=2)
        return [record for record in found if record is not None]

    def rewind(self, step: int) -> None:
        """Forgets what was recorded after `step`, which is about to be computed again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def append(self, record: dict[str, Any]) -> None:
        with runs.writable(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def write_csv(self) -> None:
        rows = ([record.get(name, "") for name in COLUMNS] for record in self.records())
        write_atomically(self.folder / "metrics.csv", csv_table(COLUMNS, rows))


def _record(line: bytes) -> dict[str, Any] | None:
    """A record of known numbers, or None if the line is no such thing."""
    try:
        record = json.loads(line.decode())
        if not isinstance(record, dict) or not set(record) <= set(COLUMNS) or not _is_step(record.get("step")):
            return None
        return record if all(_is_number(value) for value in record.values()) else None
    except (ValueError, RecursionError):
        return None


def _is_step(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (whole and abs(value) < 2**63)


def plot_losses(curves: dict[str, list[dict[str, Any]]], path: Path, *, unigram: float | None, unit: str) -> None:
    """The losses of one or more runs, as a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    draw_losses(figure.add_subplot(), curves, unigram=unigram, unit=unit)
    with runs.writable(path):
        files.save_figure(figure, path)


def draw_losses(axes: Any, curves: dict[str, list[dict[str, Any]]], *, unigram: float | None, unit: str) -> None:
    """Training loss (thin) and validation loss (marked) of each run over steps, in matplotlib axes."""
    for number, (name, records) in enumerate(curves.items()):
        for key, style, label in (("loss", {"alpha": 0.45}, None), ("eval_loss", {"marker": "o"}, name)):
            points = [(record["step"], record[key]) for record in records if math.isfinite(record.get(key, math.nan))]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=label, **style)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", label="unigram")
    losses = (record.get("eval_loss", math.nan) for records in curves.values() for record in records)
    _zoom(axes, [loss for loss in losses if math.isfinite(loss)])
    axes.set(xlabel="step", ylabel=f"nats per {unit}", title="loss; thin: training, marked: held out")
    axes.legend()


def _zoom(axes: Any, held_out: list[float]) -> None:
    """The steep first steps may leave the picture: what is compared stays large."""
    bottom, top = axes.get_ylim()
    if len(held_out) > 1:
        axes.set_ylim(bottom, min(top, max(held_out) + 0.5 * (max(held_out) - bottom)))
