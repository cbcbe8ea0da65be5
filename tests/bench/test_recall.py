"""Memory tasks: their sequences, the references, and the command."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import errors
from subquad.bench.recall import ROWS, TASKS, Plan, Result, make_task, measure, worth
from subquad.bench.recall.measure import HELD_OUT, Mean
from subquad.bench.recall.references import CHUNK, REFERENCES, DeltaRule, GatedLinearAttention
from subquad.bench.recall.rows import Shape, state_size, window_of_equal_memory
from subquad.bench.recall.tasks import IGNORED
from subquad.cli import main
from subquad.models import SubquadForCausalLM
from subquad.nn import Context, SelfAttention
from subquad.testing import assert_close

tasks = pytest.mark.parametrize("name", TASKS)


# Tasks ----------------------------------------------------------------------------------------------------------------


@tasks
def test_answers_stand_where_distances_say(name: str) -> None:
    batch = make_task(name, keys=6, length=160).batch(5, seed=3)
    rows, places = (batch.labels != IGNORED).nonzero().unbind(-1)
    assert len(rows) > 20
    assert torch.equal(batch.ids[rows, places + 1], batch.labels[rows, places])
    source = places + 1 - batch.distances[rows, places]
    assert bool((source >= 0).all())
    assert bool((source < places).all())
    assert torch.equal(batch.ids[rows, source], batch.labels[rows, places])


@tasks
def test_batches_are_functions_of_their_seed(name: str) -> None:
    task = make_task(name, keys=6, length=160)
    first, again, other = (task.batch(4, seed) for seed in (0, 0, HELD_OUT))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.ids, other.ids)
    assert first.ids.shape == (4, 160)
    assert 0 <= int(first.ids.min()) <= int(first.ids.max()) < task.vocabulary


def test_keys_have_one_value_in_a_sequence_and_others_in_another() -> None:
    ids = make_task("recall", keys=5, length=60).batch(2, seed=0).ids
    pairs = [set(zip(row[::2].tolist(), row[1::2].tolist(), strict=True)) for row in ids]
    assert all(len({key for key, _ in found}) == len(found) for found in pairs)
    assert pairs[0] != pairs[1]


def test_a_key_is_asked_for_when_it_comes_again_and_since_its_last_time() -> None:
    batch = make_task("recall", keys=5, length=60).batch(3, seed=1)
    for ids, labels, distances in zip(*batch, strict=True):
        last: dict[int, int] = {}
        for t in range(0, 60, 2):
            key = int(ids[t])
            assert (int(labels[t]) != IGNORED) == (key in last)
            if key in last:
                assert int(distances[t]) == t - last[key]
            last[key] = t
        assert bool((labels[1::2] == IGNORED).all())


def test_selected_symbols_are_scattered_in_order() -> None:
    task = make_task("selective", keys=6, length=60)
    ids = task.batch(3, seed=1).ids
    for row in ids:
        spread = (row[: 60 - 7] < 32).nonzero()[:, 0]
        assert len(spread) == 6
        assert torch.equal(row[spread], row[-6:])
    assert int((ids[:, :6] < 32).sum()) < 18


# References -----------------------------------------------------------------------------------------------------------


def step_by_step(kind: type, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    if kind is DeltaRule:
        q, k = (F.normalize(F.silu(t), dim=-1) for t in (q, k))
    for t in range(q.shape[2]):
        kt, vt = k[:, :, t, :, None], v[:, :, t, None]
        if kind is DeltaRule:
            state = state + gate[:, :, t, :, None].sigmoid() * kt * (vt - kt.mT @ state)
        else:
            state = gate[:, :, t, :, None].sigmoid() ** (1 / 16) * state + kt * vt
        outs.append(q[:, :, t, None] @ state)
    return torch.cat(outs, 2)


@pytest.mark.parametrize("kind", [GatedLinearAttention, DeltaRule])
def test_references_are_their_recurrences(kind: type) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = kind(8, 2, 0).double()
    q, k, v = torch.randn(3, 2, 2, 3 * CHUNK, 4, generator=generator, dtype=torch.float64)
    gate = torch.randn(2, 2, 3 * CHUNK, layer.gates // 2, generator=generator, dtype=torch.float64)
    assert_close(layer.attend(q, k, v, gate), step_by_step(kind, q, k, v, gate), 1e-12)


@pytest.mark.parametrize("kind", REFERENCES.values())
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK + 5])
def test_references_are_causal_at_any_length(kind: type, length: int) -> None:
    layer, x = kind(8, 2, 4).double(), torch.randn(1, length, 8, dtype=torch.float64)
    out = layer(x, Context(True))
    assert out.shape == x.shape
    other = x.clone()
    other[:, -1] += 1
    assert_close(layer(other, Context(True))[:, :-1], out[:, :-1], 1e-12) if length > 1 else None


# Measuring ------------------------------------------------------------------------------------------------------------


def test_a_window_of_equal_memory_takes_the_memory_of_favor() -> None:
    shape = Shape()
    sizes = []
    for attention, options in (("favor", shape.favor), ("window", {"window": window_of_equal_memory(shape)})):
        sizes.append(state_size(SelfAttention(shape.hidden, shape.heads, attention=attention, options=options), 512))
    assert sizes[1] <= sizes[0] < 1.03 * sizes[1]


def result(row: str, far: float, seed: int = 0) -> Result:
    return Result(row, seed, 1.0, far, {}, 0.1, 100)


def test_worth_is_the_share_of_what_exact_attention_has_over_the_window() -> None:
    results = [result("window", 0.2), result("favor", 0.8), result("softmax", 1.0), result("identity", 0.0)]
    assert worth(results, "favor") == pytest.approx(0.75)
    assert worth(results, "softmax") == 1
    assert worth(results, "identity") is None
    assert worth(results[1:], "favor") is None
    assert worth([result("window", 0.97), *results[1:]], "favor") is None  # nothing to be gained
    noisy = [result("window", far, seed) for seed, far in enumerate((0.0, 0.9))]
    assert worth([*noisy, *results[1:]], "favor") is None


def test_means_have_standard_errors_over_seeds() -> None:
    assert Mean.of([1.0, 3.0]) == Mean(2.0, 1.0)
    assert math.isnan(Mean.of([1.0]).error)


def test_a_model_learns_and_is_the_same_for_the_same_seed() -> None:
    plan = Plan(keys=4, length=48, steps=120, seeds=1, tests=16, shape=Shape(hidden=32, features=16, near=4))
    (learned,) = measure(plan, [(ROWS["softmax"], 0)])
    assert learned.near > 0.5  # a guess is right in .25
    short = replace(plan, steps=5)
    (first,), (again,), (other,) = ([*measure(short, [(ROWS["softmax"], seed)])] for seed in (0, 0, 1))
    assert first.near == again.near != other.near


def test_features_are_drawn_anew_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    redraw = SubquadForCausalLM.redraw
    monkeypatch.setattr(SubquadForCausalLM, "redraw", lambda model, seed: drawn.append(seed) or redraw(model, seed))
    plan = Plan(keys=4, length=48, steps=5, tests=8, shape=Shape(hidden=32, features=16, near=4))
    for every, wanted in ((0, []), (2, [12, 14])):
        drawn.clear()
        assert len([*measure(replace(plan, redraw_every=every), [(ROWS["favor"], 2)])]) == 1
        assert drawn == [2, *wanted]  # the seed of the model, then one for each redraw


# The command ----------------------------------------------------------------------------------------------------------


@tasks
def test_every_row_of_every_task(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--keys", "4", "--length", "144", "--steps", "2", "--seeds", "1", "--also-at", "160"]
    rows = [] if name == "recall" else ["--rows", "window,favor,gla,softmax"]
    assert main(["bench", "recall", "--task", name, *size, *rows, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "recall.json").read_text())
    names = [*ROWS] if name == "recall" else ["window", "favor", "gla", "softmax"]
    assert [r["row"] for r in report["results"]] == names
    assert all(r["state"] > 0 for r in report["results"] if r["row"] != "identity")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(row in printed for row in names)
    assert "at 160" in printed


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    monkeypatch.setattr(sys.modules["subquad.bench.recall.measure"], "train", lambda *a: trained.append(a[3]) or 0.1)
    command = ["bench", "recall", "--keys", "4", "--length", "64", "--steps", "2", "--output", str(tmp_path)]
    for rows, seeds, wanted in (("favor", 2, [0, 1]), ("favor,softmax", 2, [0, 1]), ("favor,softmax", 2, [])):
        trained.clear()
        assert main([*command, "--rows", rows, "--seeds", str(seeds)]) == 0
        assert trained == wanted
    assert len(json.loads((tmp_path / "recall.json").read_text())["results"]) == 4
    (tmp_path / "recall.json").write_text("{")
    assert main([*command, "--rows", "favor", "--seeds", "2"]) == 0
    assert main([*command, "--rows", "favor", "--seeds", "3"]) == 0  # one more
    assert main([*command, "--rows", "favor,window", "--seeds", "1"]) == 0
    assert trained == [0, 1, 2, 0]
    found = json.loads((tmp_path / "recall.json").read_text())["results"]
    assert [(r["row"], r["seed"]) for r in found] == [("favor", 0), ("favor", 1), ("favor", 2), ("window", 0)]
    trained.clear()
    assert main([*command, "--rows", "favor", "--seeds", "1", "--redraw-every", "1"]) == 0  # another plan
    assert trained == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--task", "recal"],
            "bench recall: --task must be one of recall, copy, selective, passkey, got 'recal'",
        ),
        (
            ["--keys", "64", "--length", "100"],
            "bench recall: recall with 64 keys needs at least 128 tokens, got length 100",
        ),
        (["--also-at", "8"], "bench recall: recall with 64 keys needs at least 128 tokens, got length 8"),
        (["--seeds", "0"], "--seeds: must be at least 1, got 0"),
        (["--features", "0"], "--features: must be at least 1, got 0"),
        (["--redraw-every", "-1"], "--redraw-every: must be at least 0, got -1"),
        (["--near", "-1"], "--near: must be at least 1, got -1"),
        (["--positions", "learned"], "--positions must be one of rotary, sinusoidal, none, got 'learned'"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "recall", *arguments, "--output", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_library_errors() -> None:
    with pytest.raises(errors.ConfigError, match="keys must be a whole number of at least 1, got 0"):
        make_task("copy", keys=0, length=100)
    unknown: Any = "nothing"
    with pytest.raises(errors.ConfigError, match="task must be one of"):
        make_task(unknown, keys=1, length=100)
