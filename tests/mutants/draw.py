"""Changes random lines of the package, one at a time, and runs the tests that could notice.

`python tests/mutants/draw.py --count 60 --seed 12`; every third line is C++. What is done is kept (see `covered.KEPT`)
and not done again: a draw may be interrupted, or cut into pieces with --minutes. After a survivor has got its test,
--again runs the survivors anew.
"""

import argparse
import ast
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from change import Change
from covered import KEPT, NO_TESTS, PACKAGE, Records, record, suites
from native_changes import native_changes
from python_changes import python_changes
from run import ROOT, rebuild, run_tests

from subquad.kernels.cpu.build import fingerprint

ENGINE = PACKAGE / "kernels" / "cpu"
NOT_FOUND = 4  # pytest's code where it is given a test that there is not
MEMORY = 12 << 30  # bytes of addresses
SAME_BYTES = ("-Wl,--build-id=none",) if sys.platform == "linux" else ()  # for the same code
BAD_MEMORY_ACCESS = ["-m", "full", "tests/kernels/test_cpu.py::test_no_bad_memory_access_and_no_undefined_behaviour"]
NO_MUTANT = ("does not compile", "same code")  # another line is drawn instead


def candidates(seed: int, suffixes: tuple[str, ...]) -> Iterator[Change]:
    """One change for each line that computes, in random order."""
    chance = random.Random(f"{seed}{suffixes}")
    lines: dict[tuple[str, int], list[Change]] = {}
    for path in sorted(path for suffix in suffixes for path in PACKAGE.rglob(f"*{suffix}")):
        find = python_changes if path.suffix == ".py" else native_changes
        for change in find(str(path.relative_to(PACKAGE)), path.read_text()):
            lines.setdefault((change.path, change.line), []).append(change)
    places = list(lines)
    chance.shuffle(places)
    return (chance.choice(lines[place]) for place in places)


def parses(change: Change) -> bool:
    try:
        ast.parse(change.applied((PACKAGE / change.path).read_text()))
    except SyntaxError:
        return False
    return True


def copied_tree(folder: Path) -> Path:
    """The files of the project: tests find the package and the doctests beside them."""
    leave = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".drawn", ".*_cache")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=leave))


def machine_code(library: Path, sources: Path) -> bytes:
    """The library without the fingerprint of its sources."""
    return library.read_bytes().replace(fingerprint(sources).encode(), b"")


def unchanged_code() -> bytes:
    """Of the engine as it is; the compiler makes the same of some changes."""
    kept = KEPT / f"engine-{fingerprint(ENGINE)}"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(ENGINE, Path(folder) / "cpu"))
            made = rebuild(copy, *SAME_BYTES)
            assert isinstance(made, Path), made
            kept.write_bytes(machine_code(made, copy))
    return kept.read_bytes()


def verdict(change: Change, records: Records) -> str:
    native = not change.path.endswith(".py")
    tests, seconds = records.of_engine() if native else records.of_change(change)
    if not tests:
        return "SURVIVED, no test runs it"
    if not native and not parses(change):
        return "does not compile"
    with tempfile.TemporaryDirectory() as folder:
        root = copied_tree(Path(folder))
        path = root / "src" / "subquad" / change.path
        path.write_text(change.applied(path.read_text()))
        if native:
            made = rebuild(path.parent.parent, *SAME_BYTES)
            if isinstance(made, str):
                return "does not compile"
            if machine_code(made, made.parent) == unchanged_code():
                return "same code"
        found = noticed(root, tests, 60 + 3 * seconds, MEMORY)
        return noticed(root, BAD_MEMORY_ACCESS, 1800, None) if native and found == "SURVIVED" else found


def noticed(root: Path, tests: list[str], timeout: float, memory: int | None) -> str:
    """What the tests say. Endless loops may take all time and memory; sanitizers reserve more than there is."""

    def limit() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def code(tests: list[str]) -> int:
        return run_tests(root, root / "src", tests, timeout=timeout, preexec_fn=limit).returncode

    try:
        ended = code(tests)
        if ended == NOT_FOUND:  # tests got other names, or their file cannot be imported
            ended = code(sorted({test.split("::")[0] for test in tests}))
    except subprocess.TimeoutExpired:
        return "killed, never ends"
    if ended in (NOT_FOUND, NO_TESTS, -signal.SIGKILL):
        raise RuntimeError(f"pytest ended with {ended}, which tells nothing, on {tests[:3]} ...")
    return {0: "SURVIVED", 1: "killed"}.get(ended, f"killed, pytest ended with {ended}")


class Results:
    """One line of JSON for each change that was tried."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.verdicts = {self._key(result): result["verdict"] for result in stored}

    def _key(self, result: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(result[name] for name in ("path", "line", "old", "new"))

    def describe(self, change: Change) -> dict[str, Any]:
        old, new = change.lines((PACKAGE / change.path).read_text())
        return {"path": change.path, "line": change.line, "old": old, "new": new}

    def known(self, change: Change) -> str | None:
        return self.verdicts.get(self._key(self.describe(change)))

    def add(self, change: Change, verdict: str) -> None:
        result = self.describe(change)
        self.verdicts[self._key(result)] = verdict
        with self.path.open("a") as file:
            file.write(json.dumps({**result, "verdict": verdict}) + "\n")


class Draw:
    def __init__(self, seed: int, minutes: float, again: bool) -> None:
        self.end, self.again = time.monotonic() + 60 * minutes, again
        self.python, self.native = candidates(seed, (".py",)), candidates(seed, (".hpp", ".cpp"))
        self.lock = Lock()
        self.records = Records({suite: record(suite) for suite in suites()})
        self.results = Results(KEPT / "results.jsonl")

    def outcome(self, number: int) -> str | None:
        """Of the mutant at this place of the draw; None if time is up."""
        while True:
            with self.lock:
                change = next(self.native if number % 3 == 2 else self.python)
            known = self.results.known(change)
            if known is None or (self.again and known.startswith("SURVIVED")):
                if time.monotonic() > self.end:
                    return None
                known = verdict(change, self.records)
                self.results.add(change, known)
            self.show(change, known)
            if known not in NO_MUTANT:
                return known

    def show(self, change: Change, verdict: str) -> None:
        told = self.results.describe(change)
        print(f"{verdict:20} {told['path']}:{told['line']}\n    {told['old']}\n    {told['new']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after that time")
    parser.add_argument("--again", action="store_true", help="run the survivors of before anew")
    options = parser.parse_args()
    draw = Draw(options.seed, options.minutes, options.again)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = [outcome for outcome in pool.map(draw.outcome, range(options.count)) if outcome is not None]
    survived = sum(outcome.startswith("SURVIVED") for outcome in outcomes)
    print(f"{len(outcomes)} of {options.count} done, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
