"""How torch's idle threads wait: chosen by the command, never by the library or against the user."""

import os
import subprocess
import sys
from pathlib import Path

import subquad

SOURCE = Path(subquad.__file__).parent.parent


def doctor_says(*command: str, **environment: str) -> str:
    """What `doctor` tells about idle threads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    paths = {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *command], env=kept | paths | environment, capture_output=True, text=True, check=True
    )
    return next(line.split("idle threads")[1].strip() for line in done.stdout.splitlines() if "idle threads" in line)


def test_the_command_lets_threads_sleep() -> None:
    assert doctor_says("-m", "subquad", "doctor") == "sleep (OMP_WAIT_POLICY=passive)"


def test_the_script_lets_threads_sleep(tmp_path: Path) -> None:
    script = tmp_path / "subquad"  # as an installer writes it
    script.write_text("import sys\nfrom subquad.__main__ import run\nsys.exit(run())\n")
    assert doctor_says(str(script), "doctor") == "sleep (OMP_WAIT_POLICY=passive)"


def test_the_user_decides() -> None:
    assert doctor_says("-m", "subquad", "doctor", OMP_WAIT_POLICY="active") == "spin (OMP_WAIT_POLICY=active)"


def test_a_library_leaves_it_alone() -> None:
    program = "import subquad, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"
