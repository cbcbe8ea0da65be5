"""Trains one small model per row and seed, and measures what it remembers of sequences it has not seen."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.bench.recall.rows import EXACT, NARROW, NOTHING, WINDOW, Row, Shape, state_size
from subquad.bench.recall.tasks import IGNORED, Batch, Task, make_task
from subquad.models import SubquadForCausalLM
from subquad.training.muon import MuonAdamW

FAR = 64  # tokens; answers that were seen longer ago are far
WARMUP, CLIP, HELD_OUT = 20, 1.0, 1 << 30  # HELD_OUT: seeds of batches that no model is trained on begin there


@dataclass(frozen=True)
class Plan:
    """What every row is put through."""

    task: str = "recall"
    keys: int = 64
    length: int = 512
    steps: int = 200
    seeds: int = 3
    batch: int = 8
    learning_rate: float = 0.01
    tests: int = 64  # held-out sequences
    lengths: tuple[int, ...] = ()  # other lengths to measure at
    redraw_every: int = 0  # steps between fresh random features; 0 never
    shape: Shape = field(default_factory=Shape)

    def make_task(self, length: int | None = None) -> Task:
        return make_task(self.task, self.keys, length or self.length)


@dataclass(frozen=True)
class Result:
    """Of one row and one seed. near, far: accuracy where the answer was seen at most, or more than, 64 tokens ago; NaN
    if nothing was asked there. elsewhere: accuracy far away, by length. state: bytes per layer and sequence."""

    row: str
    seed: int
    near: float
    far: float
    elsewhere: dict[int, float]
    seconds_per_step: float
    state: int


def measure(
    plan: Plan, rows: Iterable[tuple[Row, int]], progress: Callable[[int], object] = lambda _: None
) -> Iterator[Result]:
    """Of rows and seeds, each as soon as it is there. `progress` is told of every training step."""
    for row, seed in rows:
        yield _measure_one(plan, row, seed, progress)


def _measure_one(plan: Plan, row: Row, seed: int, progress: Callable[[int], object]) -> Result:
    task = plan.make_task()
    model = row.model(task, plan.shape, seed)
    seconds = train(model, plan, task, seed, progress)
    near, far = accuracies(model, task, plan.tests)
    elsewhere = {
        length: accuracies(model, plan.make_task(length), max(1, plan.tests // 4))[1] for length in plan.lengths
    }
    state = state_size(model.model.blocks[0].attention, plan.length)
    return Result(row.name, seed, near, far, elsewhere, seconds, state)


def train(model: SubquadForCausalLM, plan: Plan, task: Task, seed: int, progress: Callable[[int], object]) -> float:
    """Seconds per step: the median, so that a slow spell of the machine does not count."""
    optimizer, times = MuonAdamW(model, plan.learning_rate), []
    model.train()
    for step in range(plan.steps):
        begun = time.perf_counter()
        if plan.redraw_every and step and step % plan.redraw_every == 0:
            model.redraw(seed * plan.steps + step)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1, (step + 1) / WARMUP) * (1 - step / plan.steps)
        loss = _loss(model, task.batch(plan.batch, seed=seed * plan.steps + step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        times.append(time.perf_counter() - begun)
        progress(1)
    return sorted(times)[len(times) // 2]


def _loss(model: SubquadForCausalLM, batch: Batch) -> Tensor:
    """Of the tokens that are asked for; no others pass through the output layer."""
    asked = batch.labels != IGNORED
    hidden = model.model(batch.ids).last_hidden_state[asked]
    return F.cross_entropy(model.lm_head(hidden), batch.labels[asked])


@torch.no_grad()
def accuracies(model: SubquadForCausalLM, task: Task, count: int) -> tuple[float, float]:
    """Near and far, on `count` held-out sequences."""
    model.eval()
    right, distances = [], []
    for first in range(0, count, 8):
        batch = task.batch(min(8, count - first), seed=HELD_OUT + first)
        asked = batch.labels != IGNORED
        guess = model.lm_head(model.model(batch.ids).last_hidden_state[asked]).argmax(-1)
        right.append((guess == batch.labels[asked]).double())
        distances.append(batch.distances[asked])
    correct, distance = torch.cat(right), torch.cat(distances)
    return float(correct[distance <= FAR].mean()), float(correct[distance > FAR].mean())


@dataclass(frozen=True)
class Mean:
    """Over seeds, with its standard error (NaN for one seed; both NaN where nothing was asked)."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        count, value = len(values), sum(values) / len(values)
        error = math.sqrt(sum((x - value) ** 2 for x in values) / (count - 1) / count) if count > 1 else math.nan
        return cls(value, error)


def worth(results: Sequence[Result], row: str) -> float | None:
    """What the far field is worth: (row - window) / (exact - window), of far accuracies at equal memory.

    None without controls, for controls that have no far field, and where exact attention is better than the window by
    less than .05 or by less than two standard errors."""
    found = {name: Mean.of(far) for name in (row, WINDOW, EXACT) if (far := [r.far for r in results if r.row == name])}
    if row in (NOTHING, NARROW) or not {row, WINDOW, EXACT} <= set(found):
        return None
    gap = found[EXACT].value - found[WINDOW].value
    noise = math.hypot(*(0.0 if math.isnan(found[name].error) else found[name].error for name in (WINDOW, EXACT)))
    return (found[row].value - found[WINDOW].value) / gap if gap > max(2 * noise, 0.05) else None
