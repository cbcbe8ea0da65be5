"""No call from Python, however wrong, kills the process or gets a wrong answer: see `hostile_calls.py`."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sanitizers import sanitized_environment

SCRIPT = Path(__file__).parent / "hostile_calls.py"


def assert_survives(folder: Path, seed: int, count: int, environment: dict[str, str]) -> None:
    log = folder / f"last_{seed}.txt"
    command = [sys.executable, str(SCRIPT), "--seed", str(seed), "--count", str(count), "--log", str(log)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    repeat = f"python tests/hostile_calls.py {log.read_text()}" if log.exists() else "it did not start"
    assert done.returncode >= 0, f"killed by signal {-done.returncode}; to repeat it: {repeat}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{done.stderr[-5000:]}\nlast call: {repeat}"
    assert ", 0 neither" in done.stdout


def test_some_wrong_calls(tmp_path: Path) -> None:
    assert_survives(tmp_path, seed=0, count=300, environment=dict(os.environ))


@pytest.mark.full
def test_a_hundred_thousand_wrong_calls(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: assert_survives(tmp_path, seed, 10_000, dict(os.environ)), range(100, 110)))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' library")
def test_ten_thousand_wrong_calls_under_sanitizers(tmp_path: Path) -> None:
    environment = sanitized_environment(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: assert_survives(tmp_path, seed, 2500, environment), range(200, 204)))
