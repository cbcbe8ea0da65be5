"""What is recorded of a run: JSON lines as they come, a CSV table and a plot from them."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import files
from subquad.checks import runs
from subquad.training.files import write_atomically

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

    def records(self) -> list[dict[str, Any]]:
        """All whole records: a line cut short by a kill is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rewind(self, step: int) -> None:
        """Forgets what was recorded after `step`, which is about to be computed again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def append(self, record: dict[str, Any]) -> None:
        with runs.writable(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def write_csv(self) -> None:
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records())
        write_atomically(self.folder / "metrics.csv", out.getvalue())


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
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=label, **style)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", label="unigram")
    _zoom(axes, [record["eval_loss"] for records in curves.values() for record in records if "eval_loss" in record])
    axes.set(xlabel="step", ylabel=f"nats per {unit}", title="loss; thin: training, marked: held out")
    axes.legend()


def _zoom(axes: Any, held_out: list[float]) -> None:
    """The steep first steps may leave the picture: what is compared stays large."""
    bottom, top = axes.get_ylim()
    if len(held_out) > 1:
        axes.set_ylim(bottom, min(top, max(held_out) + 0.5 * (max(held_out) - bottom)))
