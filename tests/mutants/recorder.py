"""A plugin of pytest: writes down which test runs which line of the package, and how long each test takes.

`pytest -p recorder`, with the file to write in the environment; `covered.py` starts it.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

TARGET = "SUBQUAD_RECORD"
PACKAGE = Path(__file__).parent.parent.parent / "src" / "subquad"

measured = coverage.Coverage(data_file=None, config_file=False, source=[str(PACKAGE)])
seconds: dict[str, float] = {}


def pytest_configure() -> None:
    measured.start()  # before any test file imports the package


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured.switch_context(item.nodeid)
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        seconds[item.nodeid] = round(time.monotonic() - begun, 3)
        measured.switch_context("")  # what importing a file runs belongs to no test


def pytest_sessionfinish() -> None:
    measured.stop()
    data, number = measured.get_data(), {test: i for i, test in enumerate(seconds)}
    lines = {
        str(Path(file).relative_to(PACKAGE)): {
            line: sorted(number[test] for test in tests if test)
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    Path(os.environ[TARGET]).write_text(json.dumps({"seconds": seconds, "lines": lines}))
