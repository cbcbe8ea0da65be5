"""Benchmarks and examples run, in miniature, and write what they promise."""

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from subquad import cli
from subquad.bench.real_heads import RealModel, Sizes
from subquad.bench.recall.measure import Plan
from subquad.bench.recall.rows import Shape
from subquad.kernels.cpu import library
from tiny_heads import bert, llama

ROOT = Path(__file__).parent.parent
BENCHMARKED = ("sdpa", "identity", "linear", "favor", "favor-paper")  # the last three with both engines


def test_benchmark_in_miniature(tmp_path: Path) -> None:
    output = tmp_path / "records.json"
    small = ["--lengths", "48", "64", "--contexts", "70", "--heads", "2", "--head-dim", "8", "--repeats", "1"]
    small += ["--limit", "1e9"]  # seconds: however busy the machine is, nothing is left out
    command = [sys.executable, str(ROOT / "benchmarks" / "attention.py"), *small, "--skip-memory"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    records = [record for record in report["records"] if record["mechanism"].removesuffix(" (torch)") in BENCHMARKED]
    names = {*BENCHMARKED[:2], *(f"{name} (torch)" for name in BENCHMARKED[2:])}
    names |= set(BENCHMARKED) if library.AVAILABLE else set()
    assert {record["mechanism"] for record in records} == names
    assert len(records) == len(names) * (2 * 2 * 2 + 1)  # modes, directions, lengths; one context
    assert report["machine"]["torch"] == torch.__version__
    assert "decode, context 70" in done.stdout
    rows = growth(output, tmp_path / "growth.png")
    for name in ("sdpa", "window", "linformer", "lsh", "cluster", "strided", "pages"):
        assert rows.count(f"| {name} |") == (2 if name in ("linformer", "pages") else 4)  # modes, directions
    assert (tmp_path / "growth.png").stat().st_size > 0


def growth(records: Path, picture: Path) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), str(records), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_powers_of_growth_are_right(tmp_path: Path) -> None:
    where = {"mode": "forward", "causal": True}
    records = [
        {"mechanism": name, **where, "length": length, "best": 1e-6 * length**power, "peak_bytes": 1000 * length}
        for name, power in (("linear", 1), ("square", 2))
        for length in (1000, 4000, 16000)
    ]
    (tmp_path / "records.json").write_text(json.dumps({"records": records}))
    rows = growth(tmp_path / "records.json", tmp_path / "growth.png").splitlines()
    assert "| linear | 1.00 | 4.00 | 16 | 1.00 |" in rows
    assert "| square | 1,000 | 16,000 | 256,000 | 2.00 |" in rows
    assert "| square | 1 | 4 | 16 | 1.00 |" in rows


@pytest.mark.skipif(not library.AVAILABLE, reason="measures the native engine")
def test_scaling_in_miniature(tmp_path: Path) -> None:
    output = tmp_path / "scaling.json"
    small = ["--tokens", "40", "--lengths", "30", "70", "--repeats", "2", "--output", str(output)]
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), *small]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert len(report["threads"]) == 2 * 3 * 2 * 2  # mechanisms, numbers of heads, directions, modes
    for record in report["threads"]:
        assert record["times_faster"] == min(record["one_seconds"]) / min(record["all_seconds"])
    assert [(r["mechanism"], r["tokens"]) for r in report["lengths"]] == [
        ("linear", 30),
        ("linear", 70),
        ("favor", 30),
        ("favor", 70),
    ]
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("scaling.py: error: there is one thread only")


def test_benchmark_refuses_before_it_measures() -> None:
    for wrong, message in (
        (["--output", "no/such/folder/records.json"], "--output: there is no folder no/such/folder"),
        (["--output", "."], "--output: . is a folder"),
        (["--lengths", "0"], "argument --lengths: must be a whole number of at least 1, got '0'"),
        (["--limit", "nan"], "argument --limit: must be a number above 0, got 'nan'"),
        (["--modes", "decode", "--lengths", "64"], "--lengths: decode has --contexts instead"),
        (["--modes", "forward", "--contexts", "64"], "--contexts: only with --modes decode and --directions causal"),
        (["--modes", "decode", "--directions", "bidirectional"], "--directions: decode is causal"),
    ):
        command = [sys.executable, str(ROOT / "benchmarks" / "attention.py"), *wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"attention.py: error: {message}"


def test_kernel_approximation_in_miniature(tmp_path: Path) -> None:
    small = ["--draws", "2", "--components", "4", "8", "--model-components", "8", "--output", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "kernel_approximation.py"), *small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "kernel_approximation.json").read_text())
    assert {len(methods) for methods in report["kernel_error"].values()} == {6}
    assert set(report["kernel_error"]["digits"]["RBFSampler"]) == {"4", "8"}
    assert report["score"]["digits"]["exact kernel"]["mean"] > 0.95
    assert (tmp_path / "kernel_approximation.png").stat().st_size > 10_000
    assert "| trigonometric, orthogonal | " in done.stdout


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A module of benchmarks/ with other numbers in it, whose `main` gets these words."""

    def load(name: str, words: list[str], **changed: Any) -> Any:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        module = importlib.import_module(name)
        for key, value in changed.items():
            monkeypatch.setattr(module, key, value)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        return module

    return load


def test_far_features_in_miniature(
    benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "far.json"
    words = ["--seeds", "1", "--steps", "1", "--threads", "1", "--output", str(output)]
    shape = Shape(hidden=16, features=8, near=4)
    plan = Plan(keys=4, length=32, steps=1, batch=1, tests=1, shape=shape)
    module = benchmark("far_features", words, PLAN=plan, KEYS=(2, 4), FEATURES=(4,))
    module.main()
    names = [line.name for line in module.lines()]
    assert [record["name"] for record in json.loads(output.read_text())["results"]] == names
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    before = output.read_text()
    module.main()  # nothing is left to do
    assert output.read_text() == before


def test_conversion_in_miniature(
    benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, sizes: Any) -> RealModel:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 23, (sizes.fit + sizes.test, sizes.length), generator=generator)
        batches = [{"input_ids": row[None]} for row in ids]
        return RealModel(name, name, llama().float(), batches[: sizes.fit], batches[sizes.fit :], 16)

    words = [str(tmp_path), "--length", "96", "--fit", "2", "--tests", "2", "--steps", "1"]
    small = {"WINDOW": 32, "SINKS": 1, "FEATURES": 8}
    module = benchmark("conversion", [*words, "--rows", "no attention,constant,pages"], load_model=load, **small)
    module.main()
    results = json.loads((tmp_path / "conversion.json").read_text())["results"]
    assert [result["row"] for result in results] == ["no attention", "constant", "pages"]
    assert all(result["ratio"] > 0 and result["by_place"].keys() == {"0-95"} for result in results)
    assert "no attention" in capsys.readouterr().out
    before = (tmp_path / "conversion.json").read_text()
    module.main()  # nothing is left to do
    assert (tmp_path / "conversion.json").read_text() == before


def test_encoders_in_miniature(
    benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, sizes: Any) -> RealModel:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 23, (sizes.fit + sizes.test, sizes.length), generator=generator)
        batches = [{"input_ids": row[None]} for row in ids]
        return RealModel(name, name, bert().float(), batches[: sizes.fit], batches[sizes.fit :], 16)

    models = {"minilm": (Sizes(2, 4, 120), {"window": 32, "steps": 1})}
    module = benchmark("encoders", [str(tmp_path)], load_model=load, MODELS=models, FEATURES=8)
    module.main()
    found = json.loads((tmp_path / "encoders.json").read_text())["results"]["minilm"]
    assert found["rows"]["exact"]["cosine"] == pytest.approx(1)
    assert found["options"] == {"window": 32, "steps": 1, "num_features": 8}
    assert "neighbours kept" in capsys.readouterr().out
    before = (tmp_path / "encoders.json").read_text()
    module.main()  # nothing is left to do
    assert (tmp_path / "encoders.json").read_text() == before


def test_image_memory_in_miniature(
    benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        Image.fromarray(np.random.default_rng(0).integers(256, size=(2, 1024, 3), dtype=np.uint8)).save(
            tmp_path / f"{name}.png"
        )
    words = [str(tmp_path), str(tmp_path / "runs"), "--rows", "identity,window,softmax", "--seeds", "1", "--steps", "1"]
    words += ["--output", str(tmp_path)]
    benchmark("image_memory", words, HIDDEN=16, HEADS=1, BATCH=1, TESTS=2).main()
    report = json.loads((tmp_path / "image_memory.json").read_text())
    assert [record["row"] for record in report["results"]] == ["identity", "window", "softmax"]
    assert all(3 < record["loss"] < 5 for record in report["results"])  # log(35) is 3.6: nothing is learned in a step
    assert (tmp_path / "image_memory.png").stat().st_size > 10_000
    assert "green and blue" in capsys.readouterr().out


def test_family_memory_in_miniature(
    benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for family in range(30):  # as mmseqs writes them: the family's name, then its members
        members = [f">{family}_{i}\n{'MKTAYIAKQR'[i:] + 'LVWSGHED' * 2}\n" for i in range(4)]
        lines.append(f">{family}_0\n{''.join(members)}")
    (tmp_path / "families.fasta").write_text("".join(lines))
    words = [str(tmp_path / "families.fasta"), str(tmp_path / "runs"), "--rows", "window,softmax", "--seeds", "1"]
    words += ["--steps", "2", "--output", str(tmp_path)]
    sizes = {"LENGTH": 48, "HIDDEN": 16, "HEADS": 1, "BATCH": 2, "SHORTEST": 16, "LONGEST": 40, "TESTS": 4}
    module = benchmark("family_memory", words, **sizes)
    module.main()
    report = json.loads((tmp_path / "family_memory.json").read_text())
    assert [record["row"] for record in report["results"]] == ["window", "softmax"]
    assert report["families"] + report["held_out_families"] == 30
    assert "with relatives" in capsys.readouterr().out
    (tmp_path / "few.fasta").write_text(lines[0])
    again = benchmark("family_memory", [str(tmp_path / "few.fasta"), *words[1:]])
    with pytest.raises(SystemExit):
        again.main()
    assert "too few families" in capsys.readouterr().err


def test_code_memory_in_miniature(
    benchmark: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(tmp_path / "runs"), "--seeds", "1", "--threads", "1", "--output", str(tmp_path)]
    rows = {name: (name, {}) for name in ("window", "softmax")}
    sizes = {"LENGTH": 32, "BATCH": 1, "HIDDEN": 16, "HEADS": 1, "STEPS": 2, "ROWS": rows}
    module = benchmark("code_memory", words, **sizes)
    texts = [(f"{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 50) for i in range(6)]
    monkeypatch.setattr(module, "modules", lambda: iter(texts))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=lambda command, **_: cli.main(command[3:])))
    module.main()
    report = json.loads((tmp_path / "code_memory.json").read_text())
    assert [record["row"] for record in report["results"]] == ["window", "softmax"]
    assert (tmp_path / "code_memory.png").stat().st_size > 10_000
    assert "below the window" in capsys.readouterr().out


def test_imports_in_miniature() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "imports.py"), "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import subquad: best ")


EXAMPLES = {
    "swap_attention": (["--length", "200"], "2 layers -> softmax: output differs by 0.00 %"),
    "train_proteins": (["--steps", "2", "--window", "256"], "sample: MKT"),
    "digits": (["--steps", "2", "--output", "TMP/digits.png"], "bits per dimension"),
    "long_text": (["TMP", "--steps", "2", "--window", "128", "--prompt", "So "], "bits per byte"),
    "listops": (["--steps", "2", "--length", "40"], "always the commonest answer"),
    "mechanisms": (
        ["--steps", "2", "--window", "128", "--only", "linformer", "favor in clusters"],
        "favor in clusters",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_miniature(name: str, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("So it goes. " * 300)
    arguments, wanted = EXAMPLES[name]
    command = [
        sys.executable,
        str(ROOT / "examples" / f"{name}.py"),
        *(a.replace("TMP", str(tmp_path)) for a in arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout


def test_examples_are_short_and_all_run() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert set(files) == set(EXAMPLES)
    assert all(len(text.splitlines()) < 80 for text in files.values())


def test_listops_values_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    listops = importlib.import_module("listops")

    def value(tokens: list[str]) -> int:
        """By a stack, not by the tree they were made from."""
        stack: list[list] = [[]]
        for token in tokens:
            if token.startswith("["):
                stack.append([token[1:]])
            elif token == "]":
                name, *values = stack.pop()
                middle = sorted(values)[len(values) // 2]
                stack[-1].append({"MIN": min(values), "MAX": max(values), "MED": middle, "SM": sum(values) % 10}[name])
            else:
                stack[-1].append(int(token))
        return stack[0][0]

    chance = random.Random(3)
    for _ in range(200):
        tokens, wanted = listops.expression(chance, 120)
        assert len(tokens) <= 120
        assert value(tokens) == wanted
