"""The Hugging Face Trainer, with atomic checkpoints, a fixed data order and exact evaluation."""

from collections.abc import Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer

from subquad.checks import runs
from subquad.data import Samples
from subquad.training import checkpoints
from subquad.training.checksums import publish, staging_for
from subquad.training.metrics import summary, token_statistics
from subquad.training.ranks import from_first


class SubquadTrainer(Trainer):
    """Samples come in the order of their index (see `subquad.data.samples`); the rest is the Trainer's."""

    eval_dataset: Samples

    def __init__(self, *args: Any, keep: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep = keep
        self._staging: Path | None = None

    @property
    def trained(self) -> Any:
        return self.model

    @property
    def folder(self) -> Path:
        return Path(str(self.args.output_dir))

    # Order ------------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(cast(Sized, train_dataset or self.train_dataset))

    # Loss -------------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not bool(torch.isfinite(loss)):
            last = checkpoints.checkpoints(self.folder)
            raise runs.loss_is_no_number(float(loss), self.state.global_step + 1, last[-1] if last else None)
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and accuracy per target over all held-out samples, each counted once on however many ranks."""
        totals = torch.zeros(3, dtype=torch.float64)
        causal = self.eval_dataset.objective == "causal"
        self.trained.eval()
        for batch in self.get_eval_dataloader(eval_dataset):
            batch = self._prepare_inputs(batch)
            labels = batch.pop("labels")
            with torch.no_grad(), self.compute_loss_context_manager():
                logits = self.trained(**batch).logits
            statistics: Any = self.accelerator.gather_for_metrics(token_statistics(logits, labels, causal=causal))
            totals += statistics.double().sum(0).cpu()
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.trained.train()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in summary(totals).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer writes into a folder aside, on all ranks; then it gets its name in one step."""
        folder, name = self.folder, checkpoints.name_of(self.state.global_step)
        with ExitStack() as stack:
            mine = stack.enter_context(staging_for(folder / name)) if self.args.should_save else None
            self._staging = from_first(mine)
            super()._save_checkpoint(model, trial)
            self.wait()
            if mine is not None:
                publish(mine / name, folder / name)
            self.wait()  # nobody clears away before that
        self._staging = None
        if self.args.should_save:
            checkpoints.rotate(folder, self.keep)
        self.wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with runs.loadable_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with runs.loadable_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with runs.loadable_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Tied weights are saved once; anything else that is missing or left over makes another model."""
        self.trained.tie_weights()
        tied = self.trained.all_tied_weights_keys
        runs.same_weights([key for key in load_result.missing_keys if key not in tied], load_result.unexpected_keys)

    def wait(self) -> None:
        if dist.is_initialized():
            dist.barrier()
