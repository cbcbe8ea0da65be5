"""Training on the Hugging Face Trainer: resumable bit for bit, atomic checkpoints, records and plots."""

from subquad.training.callbacks import Redraw
from subquad.training.checkpoints import model_folder
from subquad.training.options import TrainOptions
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
