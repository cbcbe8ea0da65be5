"""What happens beside the optimisation: fresh features, records, progress, an orderly stop."""

import math
import os
import signal
import threading
import time
import warnings
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState

from subquad.checks import runs
from subquad.data import Collator, Samples
from subquad.diagnostics.far_field import far_fields
from subquad.diagnostics.uniform import useless_layers
from subquad.errors import FeatureWarning
from subquad.features.draws import derived_seed
from subquad.mechanism import Mechanism
from subquad.training.metrics import MetricsFile


class Redraw(TrainerCallback):
    """Fresh random features every so many steps: a function of the seed and the step, hence equal on all ranks."""

    def __init__(self, every: int, seed: int) -> None:
        self.every, self.seed = every, seed

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and state.global_step and state.global_step % self.every == 0:
            model = kwargs["model"]
            getattr(model, "module", model).redraw(feature_seed(self.seed, state.global_step))


class UpdateCentroids(TrainerCallback):
    """Every so many steps, moves what mechanisms learn beside the optimiser, by the batch that the step has seen.

    For that step alone a hook looks at what each such mechanism is given; the first forward pass counts. `update` adds
    up over all ranks by itself.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._seen: dict[Any, tuple[Any, ...]] = {}
        self._hooks: list[Any] = []

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and state.global_step % self.every == 0:
            model = kwargs["model"]
            learners = [m for m in model.modules() if isinstance(m, Mechanism) and hasattr(m, "update")]
            self._hooks = [m.register_forward_pre_hook(self._look, with_kwargs=True) for m in learners]

    def _look(self, mechanism: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        q, k = given[:2]
        self._seen.setdefault(mechanism, (q.detach(), k.detach(), options["key_mask"]))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        for mechanism, (q, k, key_mask) in self._seen.items():  # in the order of the layers, on all ranks
            mechanism.update(q, k, key_mask)
        self._hooks, self._seen = [], {}


class WatchFeatures(TrainerCallback):
    """Warns once if features do no better than the mean of all values would, on some rows of held-out sequences; at the
    end of all but the shortest runs, if far fields contribute nothing to the loss there.

    Looks at the time of evaluation, on the first rank alone, and takes no random numbers that training would take.
    """

    SEQUENCES, ROWS, PATIENCE = 2, 32, 100  # PATIENCE: steps in which no model learns to look far away

    def __init__(self, held_out: Samples, pad: int) -> None:
        self.held_out, self.collate = held_out, Collator(pad)
        self.warned = False

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.warned or not state.is_world_process_zero:
            return
        model = kwargs["model"]
        model = getattr(model, "module", model)
        count = min(self.SEQUENCES, len(self.held_out))
        batch = self.collate([self.held_out[index] for index in range(count)])
        batch = {name: x.to(args.device) for name, x in batch.items()}
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        layers = useless_layers(model, inputs, rows=self.ROWS)
        if layers:
            self.warned = True
            warnings.warn(runs.useless_features(layers, state.global_step), FeatureWarning, stacklevel=2)
        elif state.global_step >= max(state.max_steps, self.PATIENCE):
            idle = [far for far in far_fields(model, [batch]) if far.idle]
            if idle:
                warnings.warn(runs.idle_far_fields(idle), FeatureWarning, stacklevel=2)


def feature_seed(seed: int, step: int) -> int:
    """Seed of the random features in use from `step` on."""
    return derived_seed(seed, step)


class StopOnSignal(TrainerCallback):
    """SIGINT or SIGTERM: finish the step, save, stop. A second one stops at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():  # others cannot catch signals
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number
        os.write(2, b"\nfinishing the step and saving; once more stops at once\n")  # print() is not safe in a handler

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.received = _agree(self.received, args.device)
        if self.received is not None:
            control.should_save = control.should_training_stop = True


def _agree(number: int | None, device: torch.device) -> int | None:
    """The signal that any rank has received: ranks must save the same step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    seen = torch.tensor([number or 0], device=device)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return int(seen) or None


class Speed(TrainerCallback):
    """Time spent in training steps of this process, without evaluation and checkpoints."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step, self.seconds, self.steps, self._begun = tokens_per_step, 0.0, 0, 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._begun
        self.steps += 1

    @property
    def seconds_per_step(self) -> float | None:
        return self.seconds / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float:
        return self.steps * self.tokens_per_step / max(self.seconds, 1e-9)


class Recorder(TrainerCallback):
    """Appends to the metrics, on the first rank; a step's training and validation figures are separate records."""

    def __init__(self, file: MetricsFile, samples_per_step: int, per_epoch: int, speed: Speed) -> None:
        self.file, self.samples_per_step, self.per_epoch, self.speed = file, samples_per_step, per_epoch, speed

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        step = state.global_step
        record = {
            "step": step,
            "epoch": round(step * self.samples_per_step / self.per_epoch, 4),
            "tokens": step * self.speed.tokens_per_step,
            "seconds": round(self.speed.seconds, 3),
            **{name: value for name, value in logs.items() if name != "epoch"},
        }
        if "loss" in logs:
            record["tokens_per_second"] = round(self.speed.tokens_per_second, 1)
        self.file.append(record)


class RichProgress(TrainerCallback):
    """A bar in a terminal, a line per record elsewhere."""

    def __init__(self, console: Console, speed: Speed, unit: str) -> None:
        self.console, self.speed, self.unit = console, speed, unit
        self.bar: Progress | None = None
        self.shown = ""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.console.is_terminal and state.is_world_process_zero:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
            self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if not state.is_world_process_zero or "train_runtime" in logs:
            return
        if "loss" in logs:
            self.shown = f"loss {logs['loss']:.4f}  {self.speed.tokens_per_second:,.0f} tokens/s"
        if "eval_loss" in logs:
            held_out = describe(logs["eval_loss"], logs["eval_accuracy"], self.unit)
            self._line(f"step {state.global_step}/{state.max_steps}  held out: {held_out}")
        elif self.bar is not None:
            self.bar.update(self.task, description=self.shown)
        else:
            self._line(f"step {state.global_step}/{state.max_steps}  {self.shown}")

    def _line(self, text: str) -> None:
        (self.console if self.bar is None else self.bar.console).print(text, soft_wrap=True, highlight=False)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stop()


def describe(loss: float, accuracy: float, unit: str) -> str:
    """Loss and accuracy, with perplexity for residues and tokens, bits for bytes and pixels."""
    bits = f"{loss / math.log(2):.4f} bits per {unit}"
    quality = bits if unit in ("byte", "dim") else f"perplexity {math.exp(min(loss, 700.0)):.3f}"
    return f"loss {loss:.4f}, {quality}, accuracy {100 * accuracy:.2f} %"
