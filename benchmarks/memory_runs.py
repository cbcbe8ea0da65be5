"""What benchmarks of memory on real data share: rows trained alike, a file per model, their means."""

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from turns import attention_seconds

import subquad
from subquad.bench.recall.measure import Mean
from subquad.bench.records import machine
from subquad.files import write_text
from subquad.nn import SelfAttention
from subquad.training.metrics import plot_losses
from subquad.training.muon import MuonAdamW

RATE, WARMUP, EVAL_EVERY = 0.01, 20, 50
RESULTS = Path(__file__).parent / "results"

Layer = tuple[str, dict[str, Any]]  # a mechanism and its options
Rows = Mapping[str, list[Layer]]
Told = Callable[[], Any]  # after each step


class Learner(nn.Module, ABC):
    """A model whose loss of every token can be had."""

    @abstractmethod
    def losses(self, ids: Tensor) -> Tensor:
        """ids `[N, T] -> [N, T - 1]`: nats of every token but the first."""


def options_of(parser: argparse.ArgumentParser, rows: Rows, name: str, steps: int) -> argparse.Namespace:
    """What was asked for; `names` are rows."""
    parser.add_argument("folder", type=Path, help="for the results of single models")
    parser.add_argument("--rows", default=",".join(rows), help="train these; all that are there are shown")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"folder for {name}.json and {name}.png")
    options = parser.parse_args()
    options.names = options.rows.split(",")
    if unknown := [row for row in options.names if row not in rows]:
        parser.error(f"--rows: there is no {unknown[0]}; there are {', '.join(rows)}")
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    torch.set_num_threads(options.threads)
    return options


def measure_all(
    options: argparse.Namespace, rows: Rows, measure: Callable[[str, int, int, Told], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The records of all models in the folder, after those that were asked for are there."""
    options.folder.mkdir(parents=True, exist_ok=True)
    todo = [(row, seed) for seed in range(options.seeds) for row in options.names]
    todo = [given for given in todo if not _path(options, *given).exists()]
    with Progress() as progress:
        bar = progress.add_task("training", total=len(todo) * options.steps)
        for row, seed in todo:
            record = {"row": row, "seed": seed}
            record |= measure(row, seed, options.steps, lambda: progress.advance(bar))
            write_text(_path(options, row, seed), json.dumps(record, indent=1) + "\n")
    paths = (_path(options, row, seed) for row in rows for seed in range(options.seeds))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _path(options: argparse.Namespace, row: str, seed: int) -> Path:
    return options.folder / f"{row}-{seed}-{options.steps}.json"


def train(
    model: Learner, batches: Iterable[Tensor], steps: int, evaluated: Callable[[], float], told: Told
) -> tuple[list[dict[str, float]], float]:
    """The losses on the way, and the median of the seconds of a step."""
    optimizer = MuonAdamW(model, RATE)
    curve, times = [], []
    for step, ids in enumerate(batches):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * (1 - step / steps)
        optimizer.zero_grad()
        loss = model.losses(ids).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begun)
        curve.append({"step": step + 1, "loss": loss.item()})
        if (step + 1) % EVAL_EVERY == 0 and step + 1 < steps:
            curve[-1]["eval_loss"] = evaluated()
        told()
    return curve, sorted(times)[len(times) // 2]


@torch.no_grad()
def state_bytes(blocks: Any, shape: tuple[int, int, int, int]) -> float:
    """That a layer keeps of a whole sequence, short convolutions left out; the mean of the layers."""
    q = torch.randn(shape)
    layers: list[SelfAttention] = [block.attention for block in blocks]
    return sum(subquad.state_bytes(layer.mechanism.extend(q, q, q)[1]) for layer in layers) / len(layers)


def seconds_per_layer(rows: Rows, names: Iterable[str], shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Of each row's attention, forward and backward; the mean of its layers."""
    layers = {f"{name} {i}": layer for name in names for i, layer in enumerate(rows[name])}
    found = attention_seconds(layers, shape)
    count = {name: len(rows[name]) for name in rows if name in names}
    return {name: sum(found[f"{name} {i}"] for i in range(many)) / many for name, many in count.items()}


def save(output: Path, name: str, about: dict[str, Any], records: list[dict[str, Any]], unit: str) -> None:
    """The records and the curves of the first seed."""
    curves = {record["row"]: record["curve"] for record in records if record["seed"] == 0}
    plot_losses(curves, output / f"{name}.png", unigram=None, unit=unit)
    report = {"machine": machine(), **about, "results": records}
    write_text(output / f"{name}.json", json.dumps(report) + "\n")


def show(records: list[dict[str, Any]], seconds: dict[str, float], part: str, unit: float, names: str) -> None:
    """A line per row. part: the key of a second loss; unit: nats; names: of the columns of both losses."""

    def mean(row: str, key: str) -> Mean:
        return Mean.of([record[key] / unit for record in records if record["row"] == row])

    loss = {row: mean(row, "loss") for row in seconds}
    window, exact = (loss[row].value if row in loss else math.nan for row in ("window", "softmax"))
    print(f"row           {names}  of softmax's gain  attention, ms   ms per step   state, KiB")
    for row, of_all in loss.items():
        of_part = mean(row, part)
        share = 100 * (window - of_all.value) / (window - exact) if window != exact else math.nan
        first = next(record for record in records if record["row"] == row)
        cells = f"{of_all.value:.3f} ±{of_all.error:.3f} {of_part.value:10.3f} ±{of_part.error:.3f} {share:16.0f} %"
        cost = f"{1000 * seconds[row]:14.1f} {1000 * first['seconds_per_step']:13.0f} {first['state'] / 1024:12.0f}"
        print(f"{row:13} {cells} {cost}")
