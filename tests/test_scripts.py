"""The benchmark runs, in miniature, and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import subquad

ROOT = Path(__file__).parent.parent


def test_benchmark_in_miniature(tmp_path: Path) -> None:
    output = tmp_path / "records.json"
    small = ["--lengths", "48", "64", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--skip-memory"]
    command = [sys.executable, str(ROOT / "benchmarks" / "attention.py"), *small, "--output", str(output)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = json.loads(output.read_text())["records"]
    names = {mechanism.name for mechanism in subquad.MECHANISMS} | {"favor-paper"}
    assert {record["mechanism"] for record in records} == names
    assert len(records) == len(names) * 2 * 2 * 2  # modes, directions, lengths
    assert "softmax" in shown


def test_benchmark_refuses_before_it_measures() -> None:
    for wrong, message in (
        (["--output", "no/such/folder/records.json"], "--output: there is no folder no/such/folder"),
        (["--lengths", "0"], "argument --lengths: must be a whole number of at least 1, got '0'"),
    ):
        command = [sys.executable, str(ROOT / "benchmarks" / "attention.py"), *wrong]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == f"attention.py: error: {message}"
