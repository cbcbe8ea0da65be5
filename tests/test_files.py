"""Outputs appear whole or not at all: kills, full disks, leftovers; and nothing in the package writes otherwise."""

import ast
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import crash_outputs
import subquad
from subquad import files
from subquad.files import STAGING, publish, remove, staging_folder, sweep, write_text, written

HERE = Path(__file__).parent
SOURCE = Path(subquad.__file__).parent


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(f"{STAGING}*")]


def left_over(folder: Path, name: str, **content: str) -> Path:
    """A folder as a killed process leaves it."""
    staging = folder / f"{STAGING}{name}"
    for path, text in content.items():
        (staging / path).mkdir(parents=True)
        (staging / path / "file").write_text(text)
    return staging


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    with written(path) as staging:
        assert staging.parent == tmp_path
        assert staging.suffix == ".csv"
        staging.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert not leftovers(tmp_path)


def fails_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)


def fails_to_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("fail", [fails_in_the_block, fails_to_sync])
def test_a_failed_write_leaves_what_was_there(
    fail: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "new")
    assert path.read_text() == "old"
    assert not leftovers(tmp_path)


def test_links_modes_and_protection_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    path, link = tmp_path / "elsewhere" / "file.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(link, "né")
    assert link.is_symlink()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == ("né".encode(), 0o640)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError):
        write_text(path, "new")
    assert path.read_bytes() == "né".encode()


def test_new_files_obey_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new.txt", "")
    finally:
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_replaces_another(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with staging_folder(tmp_path / "model") as staging:
            (staging / "made").mkdir()
            (staging / "made" / "file").write_text(text)
            publish(staging / "made", tmp_path / "model")
        assert (tmp_path / "model" / "file").read_text() == text
    assert os.listdir(tmp_path) == ["model"]


def test_a_failed_rename_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "made":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with staging_folder(tmp_path / "model") as staging:
        (staging / "made").mkdir()
        with pytest.raises(OSError, match="Input/output"):
            publish(staging / "made", tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_staging_begins_empty(tmp_path: Path) -> None:
    """Whatever a killed process has left, under this or an older name."""
    left_over(tmp_path, "0123456789abcdef", made="evil")
    left_over(tmp_path, "model", made="evil")
    with staging_folder(tmp_path / "model") as staging:
        assert not list(staging.iterdir())


# Sweeping -------------------------------------------------------------------------------------------------------------


def test_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    left_over(tmp_path, "0123456789abcdef", made="half")
    (tmp_path / f"{STAGING}fedcba9876543210.csv").write_text("half")
    with written(tmp_path / "one.csv") as one, staging_folder(tmp_path / "two") as two:
        one.write_text("mine")
        sweep(tmp_path)
        assert sorted(leftovers(tmp_path)) == sorted([one.name, two.name])
    assert (tmp_path / "one.csv").read_text() == "mine"


def test_only_our_names_are_swept(tmp_path: Path) -> None:
    dear = [tmp_path / name for name in (".writing-", ".writing-notes", ".writing-0123456789abcdefg", "writing.txt")]
    for path in dear:
        path.write_text("dear")
    sweep(tmp_path)
    assert all(path.read_text() == "dear" for path in dear)
    sweep(tmp_path / "no such folder")


def test_a_folder_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    """Its process ended after the old name was taken away, and before the new folder got it."""
    staging = left_over(tmp_path, "0123456789abcdef", made="new")
    (staging / "replaced" / "model").mkdir(parents=True)
    (staging / "replaced" / "model" / "file").write_text("old")
    sweep(tmp_path)
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_a_replaced_folder_stays_away_if_the_new_one_is_there(tmp_path: Path) -> None:
    staging = left_over(tmp_path, "0123456789abcdef", made="new")
    (staging / "replaced" / "model").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("new")
    sweep(tmp_path)
    assert (tmp_path / "model" / "file").read_text() == "new"


@pytest.mark.parametrize("opened", [False, True])
def test_a_sweep_that_comes_between_takes_nothing_from_us(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may see what was made before it is locked, or hold the lock already."""
    locks, swept = files.lock, []

    def lock(path: Path) -> int | None:
        if swept:
            return locks(path)
        swept.append(path)
        handle = locks(path) if opened else None
        path.unlink()
        return handle if opened else locks(path)

    monkeypatch.setattr(files, "lock", lock)
    with written(tmp_path / "out.csv") as staging:
        assert staging not in swept
        staging.write_text("mine")
    assert (tmp_path / "out.csv").read_text() == "mine"


def test_without_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    left_over(tmp_path, "0123456789abcdef", made="half")
    write_text(tmp_path / "out.csv", "new")
    assert (tmp_path / "out.csv").read_text() == "new"
    assert leftovers(tmp_path) == [f"{STAGING}0123456789abcdef"]


def test_removed_folders_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    remove(tmp_path / "model")
    remove(tmp_path / "model")
    assert not os.listdir(tmp_path)


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    crash_outputs.prepare(folder)
    return folder


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """A write beyond this many bytes fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("command", crash_outputs.COMMANDS)
def test_a_full_disk_leaves_what_was_there(command: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made / "out"
    crash_outputs.clear(made)
    assert crash_outputs.run(command, made) == 0
    before = crash_outputs.reset(command, made)
    with file_limit(20):
        code = crash_outputs.run(command, made, quiet=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert code == 2
    assert len(lines) == 1
    assert "cannot be written (" in lines[0]
    assert crash_outputs.outputs(made) == before
    assert not leftovers(out)


def script(folder: Path, *commands: str) -> list[str]:
    command = [sys.executable, str(HERE / "crash_outputs.py"), str(folder), *commands]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def kills(lines: list[str]) -> dict[str, int]:
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def test_score_killed_at_every_step(tmp_path: Path) -> None:
    assert kills(script(tmp_path, "score"))["score"] > 8


@pytest.mark.full
def test_every_command_killed_at_every_step(tmp_path: Path) -> None:
    done = kills(script(tmp_path, *crash_outputs.COMMANDS))
    assert set(done) == set(crash_outputs.COMMANDS)
    assert min(done.values()) > 8
    assert done["calibrate"] > 30


# One writer -----------------------------------------------------------------------------------------------------------

WRITERS = {
    "write_text",
    "write_bytes",
    "savefig",
    "save",
    "savez",
    "savez_compressed",
    "write_table",
    "save_pretrained",
}
# Each gets a staging path or folder, writes to memory, appends to a log, talks to the kernel, or is transformers' own.
ALLOWED = {
    "files.py": {"write_bytes", "savefig"},
    "measure.py": {"write_text"},
    "training/checksums.py": {"write_text"},
    "training/run.py": {"save_pretrained"},
    "training/metrics.py": {"open"},
    "models/configuration.py": {"save_pretrained"},
    "conversion/saved.py": {"save_pretrained"},
    "cli/embed.py": {"savez_compressed", "write_table"},
    "cli/generate.py": {"write_bytes", "savez_compressed", "save"},
    "cli/diagnose.py": {"save"},
    "cli/spectrum.py": {"save"},
    "training/options.py": set(),
    "training/setup.py": {"save"},
    "testing/contract.py": {"save"},
}


def writes(tree: ast.AST) -> set[str]:
    """Names of the calls in a module that write files, other than by `files`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in calls]
    return {name for name, call in named if (name in WRITERS and not _ours(call)) or (name == "open" and _writes(call))}


def _ours(call: ast.Call) -> bool:
    return getattr(getattr(call.func, "value", None), "id", "") == "files"


def _writes(call: ast.Call) -> bool:
    words = [x.value for x in ast.walk(call) if isinstance(x, ast.Constant)]
    return any(word in ("w", "wb", "a", "ab", "x", "xb") for word in words)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_all_outputs_go_through_one_writer(path: Path) -> None:
    assert writes(ast.parse(path.read_text())) == ALLOWED.get(str(path.relative_to(SOURCE)), set())


def test_another_writer_would_be_seen() -> None:
    programs: dict[str, Any] = {
        "path.open('w')": {"open"},
        "open(path, mode='wb')": {"open"},
        "path.write_text('')": {"write_text"},
        "np.savez(path)": {"savez"},
        "open(path)": set(),
        "files.write_text(path, '')": set(),
    }
    for program, wanted in programs.items():
        assert writes(ast.parse(program)) == wanted, program
