"""Trains a model into a run folder, from the beginning or from where it was interrupted.

run/  run.json  metrics.jsonl  metrics.csv  loss.png  checkpoints/checkpoint-100 ...  model/
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from subquad import files
from subquad.checks import runs
from subquad.data import Collator, Corpus
from subquad.data.vocabulary import default_tokenizer
from subquad.errors import CheckpointError, DamageWarning, printable
from subquad.measure import peak_memory
from subquad.training.callbacks import (
    Recorder,
    Redraw,
    RichProgress,
    Speed,
    StopOnSignal,
    UpdateCentroids,
    WatchFeatures,
)
from subquad.training.checksums import publish, read_record, staging_for, verify, write_record
from subquad.training.metrics import MetricsFile, plot_losses
from subquad.training.options import RunRecord, TrainOptions
from subquad.training.setup import (
    RunData,
    build_model,
    build_optimizer,
    opened,
    rewind_to_newest_checkpoint,
    tensorboard_callback,
    training_arguments,
    unit_of,
    versions,
    with_threads,
)
from subquad.training.trainer import SubquadTrainer

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Result:
    """What came out; `summary.json` of the run.

    metrics: of the last evaluation. unigram_*: of a model that knows frequencies only; nats per token.
    seconds_per_step, peak_memory (bytes above what the process held before): of the process that finished
        the run; None if it did no step.
    stopped_by: the signal that ended the run early, None if it is complete.
    """

    folder: str
    step: int
    metrics: dict[str, float]
    unigram_loss: float
    unigram_accuracy: float
    unit: str
    seconds_per_step: float | None
    peak_memory: int | None
    stopped_by: int | None

    @property
    def unigram_perplexity(self) -> float:
        return math.exp(self.unigram_loss)

    @classmethod
    def of_finished(cls, folder: Path) -> "Result | None":
        """What a complete run has left: nothing is to be done again."""
        path, model = folder / SUMMARY, folder / "model"
        if not path.exists() or not model.exists():
            return None
        try:
            with runs.readable_record(path):
                stored = cls(**read_record(path))
            verify(model)
        except CheckpointError as error:  # both can be made again
            warnings.warn(runs.made_again(error), DamageWarning, stacklevel=2)
            return None
        return stored if stored.stopped_by is None else None


def train(
    corpus: Corpus,
    folder: str | Path,
    options: TrainOptions | None = None,
    *,
    resume: bool | RunRecord = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
) -> Result:
    """Trains on `corpus` and leaves everything in `folder`; under torchrun on as many processes as there are.

    Args:
        resume: go on from the newest checkpoint, or begin if there is none. Options and data must be those of the run.
            A caller that has read the record of the run gives that instead of True: it is read once.
        tokenizer: to save with the model; by default that of the corpus's domain.
    """
    disable_progress_bar()  # of saving: ours is the only one
    folder, console = Path(folder), console or Console(stderr=True)
    stored = resume if isinstance(resume, RunRecord) else RunRecord.load(folder) if resume else None
    options = with_threads(options or TrainOptions(), stored)
    arguments = training_arguments(options, folder)  # joins the other processes, if any
    data = RunData.of(corpus, options, arguments.world_size)
    model = build_model(corpus, options)
    record = RunRecord(options, corpus.domain, corpus.fingerprint, arguments.world_size, versions())
    watch = _Watch.over(folder, data, options, console)
    with opened(folder, record, stored, arguments, resume=bool(resume)):
        if (done := Result.of_finished(folder)) is not None:
            return done
        checkpoint = rewind_to_newest_checkpoint(folder, arguments)
        trainer = SubquadTrainer(
            model=model,
            args=arguments,
            train_dataset=data.train,
            eval_dataset=data.held_out,
            data_collator=Collator(corpus.vocabulary.pad),
            callbacks=[*watch.callbacks, *([tensorboard_callback(folder)] if tensorboard and watch.first else [])],
            keep=options.keep,
            optimizers=(build_optimizer(model, options), None),
        )
        for default in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(default)
        if watch.first:
            _announce(console, model, data, checkpoint)
        memory = watch.during(lambda: trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint)))
        return _finish(trainer, watch, data, folder, tokenizer or default_tokenizer(corpus.domain), memory)


@dataclass(frozen=True)
class _Watch:
    """What looks on while the Trainer works."""

    metrics: MetricsFile
    speed: Speed
    stop: StopOnSignal
    progress: RichProgress
    callbacks: list[TrainerCallback]
    first: bool  # of all processes

    @classmethod
    def over(cls, folder: Path, data: RunData, options: TrainOptions, console: Console) -> "_Watch":
        metrics, speed, stop = MetricsFile(folder), Speed(data.tokens_per_step), StopOnSignal()
        progress = RichProgress(console, speed, unit_of(data.train.corpus))
        redraw, update = Redraw(options.redraw_every, options.seed), UpdateCentroids(options.update_every)
        recorder = Recorder(metrics, data.samples_per_step, data.train.per_epoch, speed)
        features = WatchFeatures(data.held_out, data.held_out.corpus.vocabulary.pad)
        first = not dist.is_initialized() or dist.get_rank() == 0
        return cls(metrics, speed, stop, progress, [redraw, update, speed, stop, recorder, progress, features], first)

    def during(self, work: Callable[[], object]) -> int | None:
        """Runs `work`, signals caught; its peak memory."""
        try:
            with self.stop:
                return peak_memory(work)
        finally:
            self.progress.stop()


def _finish(
    trainer: SubquadTrainer,
    watch: _Watch,
    data: RunData,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    memory: int | None,
) -> Result:
    """The last evaluation; the model, if the run is complete; then what is only a record: table, plot, summary."""
    step, metrics, complete = trainer.state.global_step, watch.metrics, watch.stop.received is None
    evaluated = [logs for logs in trainer.state.log_history if logs["step"] == step and "eval_loss" in logs]
    last = trainer.evaluate() if complete and not evaluated else (evaluated or [{}])[-1]
    result = Result(
        folder=str(folder),
        step=step,
        metrics={name: value for name, value in last.items() if name.startswith("eval_")},
        unigram_loss=data.unigram.loss,
        unigram_accuracy=data.unigram.accuracy,
        unit=unit_of(data.train.corpus),
        seconds_per_step=watch.speed.seconds_per_step,
        peak_memory=memory,
        stopped_by=watch.stop.received,
    )
    if watch.first:
        if complete:
            save_model(trainer.trained, tokenizer, folder / "model")
        metrics.write_csv()
        curves = {trainer.trained.config.name: metrics.records()}
        plot_losses(curves, folder / "loss.png", unigram=data.unigram.loss, unit=result.unit)
        write_record(folder / SUMMARY, asdict(result))
    trainer.wait()
    return result


def save_model(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path, notes: Mapping[str, str] | None = None
) -> None:
    """Model and tokenizer for `from_pretrained`, whole or not at all. notes: further files, their texts by name."""
    with staging_for(folder) as staging:
        model.save_pretrained(staging / "model")
        if tokenizer is not None:
            tokenizer.save_pretrained(staging / "model")
        for name, text in (notes or {}).items():
            files.write_text(staging / "model" / name, text)
        publish(staging / "model", folder)


def _announce(console: Console, model: Any, data: RunData, checkpoint: Path | None) -> None:
    corpus, held_out = data.train.corpus, data.held_out.corpus
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"{len(corpus):,} sequences with {corpus.num_tokens:,} tokens to train on, {len(held_out):,} held out "
        f"({len(data.held_out)} samples evaluated)",
        f"{parameters:,} parameters, {model.config.name}, {data.tokens_per_step:,} tokens per step",
        *([f"continuing from {printable(str(checkpoint))}"] if checkpoint is not None else []),
    ]
    console.print("\n".join(lines), soft_wrap=True, markup=False)
