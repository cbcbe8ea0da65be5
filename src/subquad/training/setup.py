"""What a run is made of: samples, model, optimiser, arguments of the Trainer, a folder."""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from subquad import checks
from subquad.checks import data as data_checks
from subquad.checks import runs
from subquad.data import (
    Corpus,
    Crops,
    Images,
    Samples,
    Unigram,
    Windows,
    unigram_baseline,
)
from subquad.data.vocabulary import BYTES
from subquad.errors import SubquadError
from subquad.files import sweep
from subquad.models import SubquadForCausalLM, SubquadForMaskedLM
from subquad.nn import SelfAttention
from subquad.training import checkpoints
from subquad.training.callbacks import feature_seed
from subquad.training.checksums import MANIFEST, locked, verify
from subquad.training.metrics import MetricsFile
from subquad.training.muon import MuonAdamW, split_parameters
from subquad.training.options import RunRecord, TrainOptions
from subquad.training.ranks import from_first


@dataclass(frozen=True)
class RunData:
    """Training and held-out samples, and what a model without any attention would make of the latter."""

    train: Samples
    held_out: Samples
    unigram: Unigram
    samples_per_step: int

    @classmethod
    def of(cls, corpus: Corpus, options: TrainOptions, processes: int) -> "RunData":
        training, held_out = corpus.split(options.validation)
        per_step = options.batch_size * options.accumulate * processes
        train = make_samples(training, options, total=options.steps * per_step)
        if isinstance(train, Windows):
            tokens = held_out.num_tokens + len(held_out)
            data_checks.held_out_window_fits(options.window, tokens, options.validation)
        count = min(options.eval_samples, make_samples(held_out, options).per_epoch)
        evaluation = make_samples(held_out, options, total=count, evaluation=True)
        return cls(train, evaluation, unigram_baseline(training, evaluation, count), per_step)

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.train.length


def make_samples(
    corpus: Corpus, options: TrainOptions, *, total: int | None = None, evaluation: bool = False
) -> Samples:
    """Samples of the layout and objective that the options ask for; images are always whole."""
    common: dict[str, Any] = {"objective": options.objective, "seed": options.seed, "total": total}
    common["evaluation"] = evaluation
    if corpus.domain == "image":
        return Images(corpus, **common)
    kind = Windows if options.layout == "windows" else Crops
    return kind(corpus, options.window, **common)


def unit_of(corpus: Corpus) -> str:
    """What a token is."""
    if corpus.domain == "text":
        return "byte" if corpus.vocabulary == BYTES else "token"
    return {"protein": "residue", "image": "dim"}[corpus.domain]


def with_threads(options: TrainOptions, stored: RunRecord | None) -> TrainOptions:
    """Settles the number of threads: the given one, that of the run, or torch's."""
    threads = options.threads or (stored and stored.options.threads) or torch.get_num_threads()
    torch.set_num_threads(threads)
    return replace(options, threads=threads)


def training_arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    gpu, processes = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    runs.precision(options.precision, gpu)
    arguments: dict[str, Any] = {
        "output_dir": str(checkpoints.folder_of(folder)),
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


def build_model(corpus: Corpus, options: TrainOptions) -> SubquadForCausalLM | SubquadForMaskedLM:
    vocabulary = corpus.vocabulary
    config = options.config(
        length=int(corpus.lengths.max()) + 1 if corpus.domain == "image" else options.window,
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
    if options.init is not None:
        _load_weights(model, checkpoints.model_folder(options.init))
    return model


def _load_weights(model: SubquadForCausalLM | SubquadForMaskedLM, folder: Path) -> None:
    """Begins with the weights of another model, features included; where a layer has another mechanism, that stays."""
    if (folder / MANIFEST).exists():
        verify(folder)
    with runs.same_shape(folder):
        other = type(model).from_pretrained(folder, trust_remote_code=False)
        weights = other.state_dict()
        for name, layer in model.named_modules():
            if isinstance(layer, SelfAttention) and not _same_mechanism(layer, other.get_submodule(name)):
                prefix = f"{name}.mechanism."
                weights = {key: x for key, x in weights.items() if not key.startswith(prefix)}
                weights |= {prefix + key: x for key, x in layer.mechanism.state_dict().items()}
        model.load_state_dict(weights)


def _same_mechanism(layer: SelfAttention, other: nn.Module) -> bool:
    """A mixed one must also have the same parts on the same heads."""
    ours, theirs = layer.mechanism, getattr(other, "mechanism", None)
    return type(ours) is type(theirs) and getattr(ours, "owners", None) == getattr(theirs, "owners", None)


def build_optimizer(model: Any, options: TrainOptions) -> torch.optim.Optimizer:
    if options.optimizer == "muon":
        return MuonAdamW(model, options.learning_rate, weight_decay=options.weight_decay)
    matrices, vectors = split_parameters(model)
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, options.learning_rate, betas=(0.9, 0.95))


def tensorboard_callback(folder: Path) -> Any:
    with checks.needs("tensorboard", "--tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder / "tensorboard")))


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("subquad", "torch", "transformers")
    }


@contextmanager
def opened(
    folder: Path, record: RunRecord, stored: RunRecord | None, arguments: TrainingArguments, *, resume: bool
) -> Iterator[None]:
    """The folder as this run's alone; `stored`: the record of the run to continue."""
    with ExitStack() as stack:
        error: SubquadError | None = None
        if arguments.process_index == 0:
            try:
                runs.writable_folder(folder)
                stack.enter_context(locked(folder))
                _prepare(folder, record, stored, resume)
            except SubquadError as refused:
                error = refused
        runs.agreed(from_first(error))
        yield


def rewind_to_newest_checkpoint(folder: Path, arguments: TrainingArguments) -> Path | None:
    """The checkpoint to continue from, as the first process sees it; what was recorded after it is forgotten."""
    error: SubquadError | None = None
    checkpoint: Path | None = None
    if arguments.process_index == 0:
        try:
            checkpoint = checkpoints.newest(checkpoints.folder_of(folder))
            MetricsFile(folder).rewind(0 if checkpoint is None else checkpoints.step_of(checkpoint))
        except SubquadError as refused:
            error = refused
    error, checkpoint = from_first((error, checkpoint))
    runs.agreed(error)
    return checkpoint


def _prepare(folder: Path, record: RunRecord, stored: RunRecord | None, resume: bool) -> None:
    """Makes the folder a run's, or makes sure that it is this run's."""
    sweep(folder)
    sweep(checkpoints.folder_of(folder))
    if stored is not None:
        runs.same_run(folder, stored.differences(record))
    else:
        runs.free_folder(folder, resume)
        record.save(folder)
