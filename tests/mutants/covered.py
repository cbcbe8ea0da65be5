"""Which tests could notice a change of a line: by what the default suite runs, recorded once for each test file."""

import hashlib
import json
import os
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Any

from change import Change
from recorder import TARGET
from run import PYTEST, ROOT

PACKAGE = ROOT / "src" / "subquad"
KEPT = ROOT / "tests" / "mutants" / ".drawn"  # ignored by git: records of coverage, results of draws
# suites that meet C++
NATIVE = (
    "tests/test_promises.py",
    "tests/mechanisms/test_contract.py",
    *(f"tests/kernels/test_{name}.py" for name in ("cpu", "favor", "linear", "long_sequences")),
    *(f"tests/kernels/cpu/test_{name}.py" for name in ("workers", "plain_step")),
)
DEFAULTS = "tests/test_defaults.py"
NO_TESTS = 5  # pytest's code for a file whose tests all are for `make test-full`
START = 20.0  # seconds that importing takes when nobody else computes, and then some


def suites() -> list[str]:
    """What pytest is given, piece by piece: test files, then the doctests."""
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [path.as_posix() for path in files if "mutants" not in path.parts] + ["src"]


def fingerprint(suite: str) -> str:
    """Of the package and one test file: a record of others is made again."""
    digest = hashlib.sha256()
    sources = sorted(PACKAGE.rglob("*.py"))
    for path in [*sources, ROOT / suite] if suite != "src" else sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(suite: str) -> dict[str, Any]:
    """`{"seconds": {test: ...}, "lines": {file: {line: [tests]}}}`, tests by their place in the former."""
    path = KEPT / f"{suite.removesuffix('.py').replace('/', '.')}.json"
    wanted = fingerprint(suite)
    if path.exists() and (stored := json.loads(path.read_text()))["fingerprint"] == wanted:
        return stored
    KEPT.mkdir(exist_ok=True)
    search = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", TARGET: str(path)}
    command = [*PYTEST, "-p", "recorder", suite]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NO_TESTS):
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{suite} is not green without any mutant:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    stored = {"fingerprint": wanted, **json.loads(path.read_text())}
    path.write_text(json.dumps(stored))
    return stored


class Records:
    """What all suites run."""

    def __init__(self, records: dict[str, dict[str, Any]]) -> None:
        self.records = records

    @cached_property
    def tests(self) -> dict[str, list[str]]:
        return {suite: list(record["seconds"]) for suite, record in self.records.items()}

    def of_change(self, change: Change) -> tuple[list[str], float]:
        """Tests (quick suites first) that could notice a change of a Python file, and the seconds they took.

        Those that run its lines. What only an import runs (a constant, a default) is noticed by the tests of anything
        in its file; a file that only child processes run, by the test files that name it. Defaults are also looked at
        where nothing of theirs runs.
        """
        file = change.path
        chosen = self._running(file, change.runs)
        if not chosen or change.line not in change.runs:
            chosen = chosen or self._running(file, None) or self._naming(file)
            chosen[DEFAULTS] = self.tests[DEFAULTS]
        return self._in_order(chosen)

    def of_engine(self) -> tuple[list[str], float]:
        return self._in_order({suite: self.tests[suite] for suite in NATIVE})

    def _running(self, file: str, lines: range | None) -> dict[str, list[str]]:
        found = {}
        for suite, record in self.records.items():
            ran = record["lines"].get(file, {})
            numbers = {n for line, tests in ran.items() if lines is None or int(line) in lines for n in tests}
            if numbers:
                found[suite] = [self.tests[suite][n] for n in sorted(numbers)]
        return found

    def _naming(self, file: str) -> dict[str, list[str]]:
        words = {Path(file).stem, file.removesuffix(".py").replace("/", ".")}
        helpers = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
        return {
            suite: tests
            for suite, tests in self.tests.items()
            if any(word in helpers.get(ROOT / suite, "") for word in words)
        }

    def _in_order(self, chosen: dict[str, list[str]]) -> tuple[list[str], float]:
        seconds = {
            suite: sum(self.records[suite]["seconds"][test] for test in tests) for suite, tests in chosen.items()
        }
        suites = sorted(chosen, key=lambda suite: seconds[suite] / len(chosen[suite]))
        return [test for suite in suites for test in chosen[suite]], START + sum(seconds.values())
