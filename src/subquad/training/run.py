"""Trains a model into a run folder, from the beginning or from where it was interrupted.

run/  run.json  metrics.jsonl  metrics.csv  loss.png  checkpoints/checkpoint-100 ...  model/
"""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from subquad import checks
from subquad.bench import peak_memory
from subquad.checks import runs
from subquad.data import (
    Collator,
    Corpus,
    Crops,
    Images,
    Samples,
    Unigram,
    Windows,
    byte_tokenizer,
    protein_tokenizer,
    unigram_baseline,
)
from subquad.data.vocabulary import BYTES
from subquad.models import SubquadForCausalLM, SubquadForMaskedLM
from subquad.training import checkpoints
from subquad.training.callbacks import Recorder, Redraw, RichProgress, Speed, StopOnSignal, feature_seed
from subquad.training.files import publish, staging_for, sweep, write_atomically
from subquad.training.metrics import MetricsFile, plot_losses
from subquad.training.muon import MuonAdamW, split_parameters
from subquad.training.options import RunRecord, TrainOptions
from subquad.training.trainer import SubquadTrainer


@dataclass(frozen=True)
class Result:
    """What came out; `summary.json` of the run.

    metrics: of the last evaluation. unigram_*: of a model that knows frequencies only; nats per token.
    seconds_per_step, peak_memory (bytes above what the process held before): of the process that finished the run.
    stopped_by: the signal that ended the run early, None if it is complete.
    """

    folder: str
    step: int
    metrics: dict[str, float]
    unigram_loss: float
    unigram_accuracy: float
    unit: str
    seconds_per_step: float
    peak_memory: int | None
    stopped_by: int | None

    @property
    def unigram_perplexity(self) -> float:
        return math.exp(self.unigram_loss)


def train(
    corpus: Corpus,
    folder: str | Path,
    options: TrainOptions | None = None,
    *,
    resume: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
) -> Result:
    """Trains on `corpus` and leaves everything in `folder`; under torchrun on as many processes as there are.

    Args:
        resume: go on from the newest checkpoint, or begin if there is none. Options and data must be those of the run.
        tokenizer: to save with the model; by default that of the corpus's domain.
    """
    disable_progress_bar()  # of saving: ours is the only one
    folder, console = Path(folder), console or Console(stderr=True)
    options = _with_threads(options or TrainOptions(), folder, resume)
    arguments = _arguments(options, folder)  # joins the other processes, if any
    data = _Data.of(corpus, options, arguments)
    record = RunRecord(options, corpus.domain, corpus.fingerprint, _versions())
    model = _model(corpus, options)
    if arguments.process_index == 0:
        _prepare(folder, record, resume)
    if dist.is_initialized():
        dist.barrier()
    checkpoint = checkpoints.newest(folder / "checkpoints")
    metrics = MetricsFile(folder)
    if arguments.process_index == 0:
        metrics.rewind(0 if checkpoint is None else checkpoints.step_of(checkpoint))
    tokenizer = tokenizer or _tokenizer(corpus.domain)
    unit = unit_of(corpus)
    speed = Speed(data.tokens_per_step)
    stop, progress = StopOnSignal(), RichProgress(console, speed, unit)
    callbacks = [
        Redraw(options.redraw_every, options.seed),
        speed,
        stop,
        Recorder(metrics, data.samples_per_step, data.train.per_epoch, speed),
        progress,
        *([_tensorboard(folder)] if tensorboard else []),
    ]
    trainer = SubquadTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        data_collator=Collator(corpus.vocabulary.pad),
        callbacks=callbacks,
        keep=options.keep,
        optimizers=(_optimizer(model, options), None),
    )
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    _announce(console, model, data, checkpoint, arguments)
    try:
        with stop:
            memory = peak_memory(lambda: trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint)))
    finally:
        progress.stop()
    final = _finish(trainer, metrics, folder, tokenizer, data.unigram, unit, complete=stop.received is None)
    result = Result(
        folder=str(folder),
        step=trainer.state.global_step,
        metrics=final,
        unigram_loss=data.unigram.loss,
        unigram_accuracy=data.unigram.accuracy,
        unit=unit,
        seconds_per_step=speed.seconds_per_step,
        peak_memory=memory,
        stopped_by=stop.received,
    )
    if arguments.process_index == 0:
        write_atomically(folder / "summary.json", json.dumps(asdict(result), indent=2) + "\n")
    return result


@dataclass(frozen=True)
class _Data:
    train: Samples
    held_out: Samples
    unigram: Unigram
    samples_per_step: int

    @classmethod
    def of(cls, corpus: Corpus, options: TrainOptions, arguments: TrainingArguments) -> "_Data":
        training, held_out = corpus.split(options.validation)
        per_step = options.batch_size * options.accumulate * arguments.world_size
        train = make_samples(training, options, total=options.steps * per_step)
        count = min(options.eval_samples, make_samples(held_out, options).per_epoch)
        evaluation = make_samples(held_out, options, total=count)
        return cls(train, evaluation, unigram_baseline(training, evaluation, count), per_step)

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.train.length


def make_samples(corpus: Corpus, options: TrainOptions, *, total: int | None = None) -> Samples:
    """Samples of the layout and objective that the options ask for; images are always whole."""
    common: dict[str, Any] = {"objective": options.objective, "seed": options.seed, "total": total}
    if corpus.domain == "image":
        return Images(corpus, **common)
    kind = Windows if options.layout == "windows" else Crops
    return kind(corpus, options.window, **common)


def unit_of(corpus: Corpus) -> str:
    """What a token is."""
    if corpus.domain == "text":
        return "byte" if corpus.vocabulary == BYTES else "token"
    return {"protein": "residue", "image": "dim"}[corpus.domain]


def _with_threads(options: TrainOptions, folder: Path, resume: bool) -> TrainOptions:
    """Settles the number of threads: that of the run, the given one, or torch's."""
    path = folder / "run.json"
    stored = RunRecord.load(path).options.threads if resume and path.exists() else None
    threads = options.threads or stored or torch.get_num_threads()
    torch.set_num_threads(threads)
    return replace(options, threads=threads)


def _arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    gpu, processes = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_checkpointing": options.gradient_checkpointing,
        "lr_scheduler_type": options.schedule,
        "warmup_steps": options.warmup,
        "max_grad_norm": options.clip,
        "bf16": options.precision == "bfloat16",
        "fp16": options.precision == "float16",
        "eval_strategy": "steps",
        "eval_steps": options.eval_every,
        "save_steps": options.save_every,
        "logging_steps": options.log_every,
        "logging_nan_inf_filter": False,
        "seed": options.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": gpu,
        "use_cpu": not gpu,
        "ddp_find_unused_parameters": False,
    }
    if processes > 1 and not gpu:
        arguments["ddp_backend"] = "gloo"
    return TrainingArguments(**arguments)


def _prepare(folder: Path, record: RunRecord, resume: bool) -> None:
    """Makes the folder a run's, or makes sure that it is this run's."""
    path = folder / "run.json"
    runs.writable_folder(folder)
    sweep(folder)
    sweep(folder / "checkpoints")
    if resume and path.exists():
        runs.same_run(folder, RunRecord.load(path).differences(record))
        return
    runs.free_folder(folder, resume)
    record.save(path)


def _model(corpus: Corpus, options: TrainOptions) -> SubquadForCausalLM | SubquadForMaskedLM:
    vocabulary = corpus.vocabulary
    config = options.config(
        vocab_size=vocabulary.size,
        pad_token_id=vocabulary.pad,
        bos_token_id=vocabulary.sep,
        eos_token_id=vocabulary.sep,
        domain=corpus.domain,
        image_shape=None if corpus.image_shape is None else list(corpus.image_shape),
    )
    set_seed(options.seed)
    model = (SubquadForCausalLM if options.objective == "causal" else SubquadForMaskedLM)(config)
    drawn = model.redraw(feature_seed(options.seed, 0))
    runs.something_to_redraw(options.redraw_every, drawn)
    return model


def _optimizer(model: Any, options: TrainOptions) -> torch.optim.Optimizer:
    if options.optimizer == "muon":
        return MuonAdamW(model, options.learning_rate, weight_decay=options.weight_decay)
    matrices, vectors = split_parameters(model)
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, options.learning_rate, betas=(0.9, 0.95))


def _finish(
    trainer: SubquadTrainer,
    metrics: MetricsFile,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    unigram: Unigram,
    unit: str,
    *,
    complete: bool,
) -> dict[str, float]:
    """The last evaluation, table and plot; the model, if the run is complete."""
    step, model = trainer.state.global_step, trainer.trained
    evaluated = [record for record in metrics.records() if record["step"] == step and "eval_loss" in record]
    final = trainer.evaluate() if complete and not evaluated else (evaluated or [{}])[-1]
    if trainer.args.process_index == 0:
        metrics.write_csv()
        plot_losses({model.config.name: metrics.records()}, folder / "loss.png", unigram=unigram.loss, unit=unit)
        if complete:
            save_model(model, tokenizer, folder / "model")
    trainer._wait()
    return {name: value for name, value in final.items() if name.startswith("eval_")}


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Model and tokenizer for `from_pretrained`, whole or not at all."""
    with staging_for(folder) as staging:
        model.save_pretrained(staging / "model")
        if tokenizer is not None:
            tokenizer.save_pretrained(staging / "model")
        publish(staging / "model", folder)


def _tokenizer(domain: str) -> PreTrainedTokenizerBase | None:
    return {"protein": protein_tokenizer, "text": byte_tokenizer}[domain]() if domain != "image" else None


def _tensorboard(folder: Path) -> Any:
    with checks.needs("tensorboard", "--tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder / "tensorboard")))


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("subquad", "torch", "transformers")
    }


def _announce(console: Console, model: Any, data: _Data, checkpoint: Path | None, arguments: TrainingArguments) -> None:
    if arguments.process_index:
        return
    corpus, held_out = data.train.corpus, data.held_out.corpus
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{len(corpus):,} sequences with {corpus.num_tokens:,} tokens to train on, {len(held_out):,} held out "
        f"({len(data.held_out)} samples evaluated)"
    )
    console.print(f"{parameters:,} parameters, {model.config.name}, {data.tokens_per_step:,} tokens per step")
    if checkpoint is not None:
        console.print(f"continuing from {checkpoint}")
