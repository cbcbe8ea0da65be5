"""What is told and recorded beside training, by a clock that the tests move."""

import io
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState

from stopped_clock import Clock
from subquad.training import callbacks
from subquad.training.callbacks import Recorder, RichProgress, Speed, StopOnSignal, describe
from subquad.training.metrics import MetricsFile


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    return clock


def tell(callback: Any, event: str, step: int = 0, *, first: bool = True, **kwargs: Any) -> None:
    """What the Trainer would call at that step of ten."""
    state = TrainerState(global_step=step, max_steps=10, is_world_process_zero=first)
    getattr(callback, event)(None, state, TrainerControl(), **kwargs)


def after_two_steps(clock: Clock) -> Speed:
    """Of 1,000 tokens each, in 0.5 and 1.5 seconds, with eight seconds of evaluation between them."""
    speed = Speed(tokens_per_step=1000)
    for seconds in (0.5, 1.5):
        tell(speed, "on_step_begin")
        clock.now += seconds
        tell(speed, "on_step_end")
        clock.now += 8
    return speed


# Signals --------------------------------------------------------------------------------------------------------------


def test_a_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    done: list[tuple[Any, ...]] = []
    stop = StopOnSignal()
    stop._note(signal.SIGTERM, None)
    assert stop.received == signal.SIGTERM
    assert capfd.readouterr().err == "\nfinishing the step and saving; once more stops at once\n"
    monkeypatch.setattr(callbacks.signal, "signal", lambda *what: done.append(what))
    monkeypatch.setattr(callbacks.os, "kill", lambda *what: done.append(what))
    stop._note(signal.SIGINT, None)
    assert done == [(signal.SIGINT, signal.SIG_DFL), (os.getpid(), signal.SIGINT)]


@pytest.mark.parametrize(("mine", "others", "agreed"), [(None, 0, None), (None, 15, 15), (2, 0, 2), (2, 15, 15)])
def test_ranks_stop_together(
    mine: int | None, others: int, agreed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(seen: torch.Tensor, op: object) -> None:
        assert op == callbacks.dist.ReduceOp.MAX
        seen.clamp_(min=others)

    monkeypatch.setattr(callbacks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(callbacks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(callbacks.dist, "all_reduce", all_reduce)
    assert callbacks._agree(mine, torch.device("cpu")) == agreed


def test_signals_are_left_alone_in_other_threads() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def work() -> None:
        with StopOnSignal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# Speed ----------------------------------------------------------------------------------------------------------------


def test_speed_counts_the_time_in_steps_only(clock: Clock) -> None:
    speed = after_two_steps(clock)
    assert (speed.steps, speed.seconds) == (2, 2.0)
    assert speed.seconds_per_step == 1.0
    assert speed.tokens_per_second == 1000.0


def test_speed_before_the_first_step(clock: Clock) -> None:
    speed = Speed(tokens_per_step=1000)
    assert speed.seconds_per_step is None
    assert speed.tokens_per_second == 0.0


def test_a_clock_too_coarse_to_see_a_step(clock: Clock) -> None:
    speed = Speed(tokens_per_step=2)
    tell(speed, "on_step_begin")
    tell(speed, "on_step_end")
    assert speed.seconds_per_step == 0.0
    assert speed.tokens_per_second == pytest.approx(2e9)


# Records --------------------------------------------------------------------------------------------------------------


def test_records_hold_the_figures_of_the_step(clock: Clock, tmp_path: Path) -> None:
    recorder = Recorder(MetricsFile(tmp_path), samples_per_step=3, per_epoch=7, speed=after_two_steps(clock))
    tell(recorder, "on_log", 2, logs={"loss": 3.25, "grad_norm": 0.5, "epoch": 99.0})
    tell(recorder, "on_log", 2, logs={"eval_loss": 3.0, "eval_accuracy": 0.25, "epoch": 99.0})
    tell(recorder, "on_log", 2, logs={"train_runtime": 5.0, "train_loss": 3.0})
    tell(recorder, "on_log", 3, logs={"loss": 1.0}, first=False)
    where = {"step": 2, "epoch": 0.8571, "tokens": 2000, "seconds": 2.0}
    assert recorder.file.records() == [
        {**where, "loss": 3.25, "grad_norm": 0.5, "tokens_per_second": 1000.0},
        {**where, "eval_loss": 3.0, "eval_accuracy": 0.25},
    ]


# Progress -------------------------------------------------------------------------------------------------------------


def progress(speed: Speed, *, terminal: bool = False) -> tuple[RichProgress, io.StringIO]:
    out = io.StringIO()
    return RichProgress(Console(file=out, force_terminal=terminal, width=200), speed, "residue"), out


def test_a_line_for_each_record_without_a_terminal(clock: Clock) -> None:
    told, out = progress(after_two_steps(clock))
    tell(told, "on_train_begin")
    assert told.bar is None
    tell(told, "on_step_end", 2)
    tell(told, "on_log", 2, logs={"loss": 3.25})
    tell(told, "on_log", 2, logs={"eval_loss": math.log(8), "eval_accuracy": 0.25})
    tell(told, "on_log", 2, logs={"train_runtime": 5.0, "train_loss": 3.0})
    tell(told, "on_log", 3, logs={"loss": 1.0}, first=False)
    tell(told, "on_train_end", 2)
    assert out.getvalue().splitlines() == [
        "step 2/10  loss 3.2500  1,000 tokens/s",
        "step 2/10  held out: loss 2.0794, perplexity 8.000, accuracy 25.00 %",
    ]


def test_a_bar_in_a_terminal_says_how_far_training_is(clock: Clock) -> None:
    told, out = progress(after_two_steps(clock), terminal=True)
    tell(told, "on_train_begin", 1)
    assert told.bar is not None
    task = told.bar.tasks[0]
    assert (task.description, task.completed, task.total) == ("training", 1, 10)
    tell(told, "on_step_end", 2)
    assert task.completed == 2
    tell(told, "on_log", 2, logs={"loss": 3.25})
    assert task.description == "loss 3.2500  1,000 tokens/s"
    tell(told, "on_log", 2, logs={"eval_loss": math.log(8), "eval_accuracy": 0.25})
    assert task.description == "loss 3.2500  1,000 tokens/s"
    bar = told.bar
    tell(told, "on_train_end", 2)
    assert told.bar is None
    assert bar.finished is False
    assert not bar.live.is_started
    assert "step 2/10  held out: loss 2.0794, perplexity 8.000, accuracy 25.00 %" in out.getvalue()


def test_only_the_first_process_shows_a_bar(clock: Clock) -> None:
    told, out = progress(after_two_steps(clock), terminal=True)
    tell(told, "on_train_begin", first=False)
    told.stop()
    assert told.bar is None
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("unit", "quality"),
    [
        ("residue", "perplexity 4.000"),
        ("token", "perplexity 4.000"),
        ("byte", "2.0000 bits per byte"),
        ("dim", "2.0000 bits per dim"),
    ],
)
def test_losses_are_told_in_the_units_of_their_field(unit: str, quality: str) -> None:
    assert describe(math.log(4), 0.125, unit) == f"loss 1.3863, {quality}, accuracy 12.50 %"


def test_the_perplexity_of_a_hopeless_model_is_a_number() -> None:
    assert describe(1e4, 0.0, "residue") == f"loss 10000.0000, perplexity {math.exp(700):.3f}, accuracy 0.00 %"
