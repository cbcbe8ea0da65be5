"""Our Trainer between the calls of Hugging Face's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from processes import OPTIONS, quiet_train
from subquad.checks import runs
from subquad.errors import CheckpointError
from subquad.training import SubquadTrainer, run


def test_after_a_checkpoint_the_folder_is_again_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SubquadTrainer] = []

    class Kept(SubquadTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(run, "SubquadTrainer", Kept)
    quiet_train(tmp_path, replace(OPTIONS, steps=2, eval_every=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert made[0]._get_output_dir(None) == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("size mismatch\nof many tensors"), "size mismatch"), (KeyError(), "KeyError")],
    ids=["first line", "no words"],
)
def test_why_a_checkpoint_cannot_be_loaded(error: Exception, reason: str) -> None:
    with pytest.raises(CheckpointError) as caught, runs.loadable_checkpoint("checkpoint-2"):
        raise error
    assert str(caught.value) == f"checkpoint-2: cannot be loaded ({reason}); it is of another version or model"
