"""Random damages of all files that a run or a model folder holds: old, new, or one clear line; never a traceback."""

import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import crash_outputs
import subquad.data
from processes import OPTIONS, quiet_train, weights
from subquad.cli import main
from subquad.data import load_proteins
from subquad.errors import DamageWarning
from subquad.files import remove
from subquad.training.checksums import read_record

SHORT = replace(OPTIONS, steps=4, save_every=2, eval_every=4, log_every=1)
Damage = Callable[[bytes, random.Random], bytes]


def flip_a_bit(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]


def change_a_byte(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]


def no_text(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + b"\xff\xfe" + content[place:]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def repeat(content: bytes, chance: random.Random) -> bytes:
    return content + content[chance.randrange(len(content)) :]


def zeros(content: bytes, chance: random.Random) -> bytes:
    """A page that never reached the disk."""
    place = chance.randrange(len(content))
    return content[:place] + bytes(len(content[place : place + 4096])) + content[place + 4096 :]


def lose_a_line(content: bytes, chance: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def another_digit(content: bytes, chance: random.Random) -> bytes:
    places = [i for i, byte in enumerate(content) if chr(byte).isdigit()] or [0]
    place = chance.choice(places)
    return content[:place] + str(chance.randrange(10)).encode() + content[place + 1 :]


def replaced(content: bytes, chance: random.Random) -> bytes:
    return chance.choice(REPLACEMENTS)


def noise(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(len(content))


REPLACEMENTS = (b"", b"[]", b"{}", b"null", b"3", b'"text"', b"\xff", b"[" * 50_000, b"\x80\x04}.")
CHANGES: tuple[Damage, ...] = (
    flip_a_bit,
    change_a_byte,
    no_text,
    cut,
    repeat,
    zeros,
    lose_a_line,
    another_digit,
    replaced,
    noise,
)


def damage_a_file(folder: Path, chance: random.Random) -> str:
    """What was done to which file."""
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    path, kind = chance.choice(inside), chance.randrange(len(CHANGES) + 3)
    content = path.read_bytes()
    if kind < len(CHANGES) and content:
        path.write_bytes(CHANGES[kind](content, chance))
    elif kind == len(CHANGES):
        path.write_bytes(chance.choice(inside).read_bytes())
    else:
        path.unlink()
        if kind == len(CHANGES) + 1:
            path.mkdir()
    return f"{path.relative_to(folder)}, damage {kind}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, the same run stopped half-way, and a model with some proteins and their scores."""
    folder = tmp_path_factory.mktemp("damages")
    quiet_train(folder / "finished", SHORT)
    shutil.copytree(folder / "finished", folder / "stopped")
    for part in ("model", "checkpoints/checkpoint-4"):
        remove(folder / "stopped" / part)
    for part in ("summary.json", "metrics.csv", "loss.png"):
        (folder / "stopped" / part).unlink()
    quiet_train(folder / "three", replace(SHORT, steps=6, keep=3))
    crash_outputs.prepare(folder)
    crash_outputs.clear(folder)
    assert crash_outputs.run("score", folder) == 0
    return folder


@pytest.fixture(autouse=True)
def corpus_once(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_proteins()
    monkeypatch.setattr(subquad.data, "load_proteins", lambda *_: corpus)


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code: 0, or 2 with one line. An exception would be a traceback."""
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.simplefilter("always", DamageWarning)
        code = main(arguments)
    shown = capsys.readouterr()
    complaints = [line for line in shown.err.splitlines() if line.startswith("subquad: error: ")]
    assert code in (0, 2)
    assert len(complaints) == (code == 2), shown.err
    assert "Traceback" not in shown.err
    assert "panicked" not in shown.err
    return code


def damaged_run(seed: int, made: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    chance = random.Random(seed)
    kind = chance.choice(("finished", "stopped", "three"))
    shutil.copytree(made / kind, folder)
    damage_a_file(folder, chance)
    code = outcome(["train", "protein", "--resume", "--out", str(folder)], capsys)
    if code == 0:
        whole = made / ("finished" if kind == "stopped" else kind)
        assert weights(folder) == weights(whole)
        results = [read_record(run / "summary.json")["metrics"] for run in (folder, whole)]
        assert results[0] == results[1]
    return code


def damaged_model(seed: int, made: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """With its checksums a model is what it was, or is refused; without them nobody can know, but no line is lost."""
    chance = random.Random(seed)
    shutil.copytree(made / "model", folder)
    checked = chance.random() < 0.5
    if not checked:
        (folder / "files.json").unlink()
    damage_a_file(folder, chance)
    output = folder.with_suffix(".csv")
    code = outcome(["score", str(folder), str(made / "some.fasta"), "--output", str(output)], capsys)
    if code == 0 and checked and (folder / "files.json").exists():
        assert output.read_bytes() == (made / "out" / "scores.csv").read_bytes()
    assert output.exists() == (code == 0)
    return code


def survive(seeds: range, made: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the damages fall on runs, half on models; some of each kind are mended, some are refused."""
    codes: dict[bool, list[int]] = {False: [], True: []}
    for seed in seeds:
        place, of_run = folder / str(seed), seed % 2 == 0
        suffer = damaged_run if of_run else damaged_model
        try:
            codes[of_run].append(suffer(seed, made, place, capsys))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        shutil.rmtree(place)
    assert {*codes[False], *codes[True]} == {0, 2}


def test_damages(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    survive(range(60), made, tmp_path, capsys)


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_five_hundred_damages(part: int, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    survive(range(1000 + 100 * part, 1100 + 100 * part), made, tmp_path, capsys)
