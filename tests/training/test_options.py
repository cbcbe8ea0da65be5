"""Options of a run: every one of them is checked when they are made, before a folder is touched."""

import math

import pytest

from subquad.errors import SubquadError
from subquad.training import TrainOptions

COUNTS = ("steps", "batch_size", "accumulate", "eval_every", "eval_samples", "save_every", "keep", "log_every")
CHOICES = {
    "objective": (("causal", "masked"), "casual", "one of causal, masked, got 'casual' (did you mean 'causal'?)"),
    "layout": (("windows", "crops"), "crop", "one of windows, crops, got 'crop' (did you mean 'crops'?)"),
    "precision": (("float32", "bfloat16", "float16"), "double", "one of float32, bfloat16, float16, got 'double'"),
    "optimizer": (("muon", "adamw"), "adam", "one of muon, adamw, got 'adam' (did you mean 'adamw'?)"),
    "schedule": (
        ("cosine", "linear", "constant"),
        "line",
        "one of cosine, linear, constant, got 'line' (did you mean 'linear'?)",
    ),
}
WRONG = {
    **{
        f"{name}={value!r}": (name, value, f"a whole number of at least 1, got {value!r}")
        for name in COUNTS
        for value in (0, 1.5)
    },
    **{
        f"{name}=-1": (name, -1, "a whole number of at least 0, got -1")
        for name in ("warmup", "redraw_every", "update_every")
    },
    **{f"{name}={wrong!r}": (name, wrong, message) for name, (_, wrong, message) in CHOICES.items()},
    "threads=0": ("threads", 0, "a whole number of at least 1, got 0"),
    "threads=1025": ("threads", 1025, "at most 1024, got 1025"),
    "learning_rate=0": ("learning_rate", 0, "a positive number, got 0"),
    "clip=0": ("clip", 0.0, "a positive number, got 0.0"),
    "clip=nan": ("clip", math.nan, "a positive number, got nan"),
    "weight_decay=-1": ("weight_decay", -1, "a number of at least 0, got -1"),
    "seed=-1": ("seed", -1, "a whole number of at least 0, got -1"),
}


@pytest.mark.parametrize(("name", "value", "rule"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(SubquadError) as caught:
        TrainOptions(**{name: value})  # pyright: ignore
    assert str(caught.value) == f"train: {name} must be {rule}"


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (allowed, _, _) in CHOICES.items() for value in allowed]
    + [(name, 1) for name in (*COUNTS, "threads")]
    + [(name, 0) for name in ("warmup", "redraw_every", "update_every", "weight_decay", "seed")]
    + [("threads", 1024)],
)
def test_the_ends_of_what_is_allowed(name: str, value: object) -> None:
    assert getattr(TrainOptions(**{name: value}), name) == value  # pyright: ignore
