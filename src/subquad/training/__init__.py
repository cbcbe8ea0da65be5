"""Training on the Hugging Face Trainer: resumable bit for bit, atomic checkpoints, records and plots."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from subquad.checks.extras import extra
from subquad.training.options import TrainOptions

if TYPE_CHECKING:
    from subquad.training.callbacks import Redraw
    from subquad.training.checkpoints import model_folder
    from subquad.training.run import Result, save_model, train
    from subquad.training.setup import make_samples, unit_of
    from subquad.training.trainer import SubquadTrainer

__all__ = [
    "Redraw",
    "Result",
    "SubquadTrainer",
    "TrainOptions",
    "make_samples",
    "model_folder",
    "save_model",
    "train",
    "unit_of",
]

_PLACES = {
    "Redraw": "callbacks",
    "Result": "run",
    "SubquadTrainer": "trainer",
    "make_samples": "setup",
    "model_folder": "checkpoints",
    "save_model": "run",
    "train": "run",
    "unit_of": "setup",
}


def __getattr__(name: str) -> Any:
    """The Trainer takes seconds to import: it is when it is first asked for, not when the command shows its options."""
    if name not in _PLACES:
        raise AttributeError(f"module 'subquad.training' has no attribute {name!r}")
    with extra("subquad.training", "cli"):
        return getattr(import_module(f"subquad.training.{_PLACES[name]}"), name)
