"""Benchmarks and examples run, in miniature, and write what they promise."""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from subquad.kernels.cpu import library

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
    for name in ("sdpa", "window", "linformer", "lsh", "cluster", "strided"):
        assert rows.count(f"| {name} |") == (2 if name == "linformer" else 4)  # modes, directions
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
