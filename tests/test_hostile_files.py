"""Files made to do harm: code, formulas, control characters, bombs, disks without room. Each is one clear line."""

import builtins
import json
import os
import pickle
import resource
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import crash_outputs
import tiny_folders
from subquad import errors
from subquad.cli import main
from subquad.data import load_images, load_proteins, load_text, protein_tokenizer
from subquad.errors import printable
from subquad.tables import csv_table
from subquad.training import model_folder

EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass EvilConfig: pass\n"
ESCAPE = "\x1b[2J"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    crash_outputs.prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers would take an exception here for a no."""
    asked: list[Any] = []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "no")
    yield
    assert not asked


def complaint(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an exit with code 2."""
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err.removeprefix("subquad: error: ").rstrip("\n")


# Code -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["diagnose", "spectrum", "score", "embed", "generate"])
def test_models_with_code_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "evil.py").write_text(EVIL)
    maps = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilConfig"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": maps}))
    (tmp_path / "text.txt").write_text("words")
    files = [] if command == "generate" else [tmp_path / "text.txt"]
    assert complaint([command, model, *files], capsys) == (
        f"{model}: asks to run Python code that comes with it, which subquad never does; if you trust it, load the "
        "model in Python with trust_remote_code=True and use subquad.diagnose, subquad.calibrate or "
        "subquad.diagnostics.spectrum there"
    )
    assert not list(tmp_path.rglob("ran"))


def test_our_models_need_no_code(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config that names code is read as ours, without it."""
    shutil.copytree(made / "model", tmp_path / "model")
    (tmp_path / "model" / "files.json").unlink()
    (tmp_path / "model" / "evil.py").write_text(EVIL)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    maps = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilConfig"}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "auto_map": maps}))
    for command in (["score"], ["diagnose", "--length", "32", "--rows", "4"]):
        assert main([command[0], str(tmp_path / "model"), str(made / "some.fasta"), *command[1:]]) == 0
    assert not list(tmp_path.rglob("ran"))


def test_tokenizers_with_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "evil.py").write_text(EVIL)
    maps = {"AutoTokenizer": ["evil.EvilConfig", None]}
    (tokens / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": maps}))
    (tmp_path / "text.txt").write_text("words")
    assert complaint(["train", "text", tmp_path / "text.txt", "--tokenizer", tokens], capsys) == (
        f"--tokenizer {tokens}: asks to run Python code that comes with it, which subquad never does; if you trust it, "
        "load it in Python with trust_remote_code=True and give it to subquad.data.load_text"
    )
    assert not list(tmp_path.rglob("ran"))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_weights_that_run_code_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(made / "model", model)
    for name in ("files.json", "model.safetensors"):
        (model / name).unlink()
    torch.save({"model.embed_tokens.weight": Evil(tmp_path / "ran")}, model / "pytorch_model.bin")
    assert complaint(["score", model, made / "some.fasta"], capsys) == (
        f"{model}: holds a pickle that would run code, which is never loaded; use weights as safetensors, or a "
        "checkpoint that subquad has written"
    )
    np.savez(tmp_path / "images.npz", images=np.array([Evil(tmp_path / "ran")], dtype=object))
    assert "images.npz: cannot be read (" in complaint(["train", "image", tmp_path / "images.npz"], capsys)
    (tmp_path / "images.npz").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    assert "images.npz: " in complaint(["train", "image", tmp_path / "images.npz"], capsys)
    assert not (tmp_path / "ran").exists()


def test_folders_of_transformers_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the code of a tokenizer nor a pickle of weights, in folders that load without them."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    tiny_folders.save_llama(model)
    text.write_text("a road")
    assert main(["score", str(model), str(text)]) == 0
    shutil.copytree(model, tmp_path / "tokens")
    (tmp_path / "tokens" / "evil.py").write_text(EVIL)
    names = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.EvilConfig", None]}}
    (tmp_path / "tokens" / "tokenizer_config.json").write_text(json.dumps(names))
    assert complaint(["score", tmp_path / "tokens", text], capsys).startswith(
        f"{tmp_path / 'tokens'}: asks to run Python code that comes with it, which subquad never does; "
    )
    (model / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil(tmp_path / "ran")}, model / "pytorch_model.bin")
    for command in ("score", "embed", "diagnose"):
        assert complaint([command, model, text], capsys).startswith(
            f"{model}: holds a pickle that would run code, which is never loaded; "
        )
    assert not list(tmp_path.rglob("ran"))


# Names ----------------------------------------------------------------------------------------------------------------


def test_formulas_are_text_in_csv() -> None:
    names = ["=1+1", "+cmd", "-x", "@sum", "\tx", "\rx", "'x", "plain", "-1.5", "+2e5", "-", "=2"]
    lines = csv_table(["name"], [[name] for name in names])
    assert lines == ("name\n'=1+1\n'+cmd\n'-x\n'@sum\n'\tx\n\"'\rx\"\n'x\nplain\n-1.5\n+2e5\n'-\n'=2\n")
    assert csv_table(["a", "b"], [[-1, -2.5]]) == "a,b\n-1,-2.5\n"


def test_names_of_sequences(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formulas are escaped in CSV wherever it goes, control characters wherever a terminal shows them."""
    (tmp_path / "some.fasta").write_text(f">=cmd()\nMKV\n>a{ESCAPE}b\nMKV\n")
    arguments = ["score", str(made / "model"), str(tmp_path / "some.fasta")]
    assert main(arguments) == 0
    names = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["name", "'=cmd()", "a\\x1b[2Jb"]
    assert main([*arguments, "--output", str(tmp_path / "s.csv")]) == 0
    names = [line.split(",")[0] for line in (tmp_path / "s.csv").read_text().splitlines()]
    assert names == ["name", "'=cmd()", f"a{ESCAPE}b"]


def test_control_characters_in_errors(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.fasta").write_text(f">a{ESCAPE}b\nMK1\n")
    with pytest.raises(errors.DataError) as caught:
        load_proteins([tmp_path / "some.fasta"])
    assert "some.fasta: a\\x1b[2Jb: '1' at position 3 is no amino acid" in str(caught.value)
    assert "no\\x1b[2J: does not exist" in complaint(["score", f"no{ESCAPE}", tmp_path / "some.fasta"], capsys)
    assert "No such command 'x\\x1b[2J'" in complaint([f"x{ESCAPE}"], capsys)
    assert printable("é\u202ea\udcff\n") == "é\\u202ea\\udcff\\n"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (errors.DataError, str(caught.value))


def test_names_of_files(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters, markup, and bytes that are no UTF-8."""
    folder = tmp_path / f"[/b]{ESCAPE}"
    shutil.copytree(made / "model", folder / "model")
    out = folder / os.fsdecode(b"\xff.fasta")
    assert main(["generate", str(folder / "model"), "--length", "3", "--output", str(out)]) == 0
    shown = capsys.readouterr().err
    assert ESCAPE not in shown
    assert "[/b]\\x1b[2J/\\udcff.fasta" in shown
    assert "[/b]\\x1b[2J/model\n" in out.read_text()
    tiny = ["--window", "64", "--layers", "1", "--hidden", "8", "--heads", "1", "--steps", "1", "--eval-samples", "1"]
    assert main(["train", "protein", *tiny, "--threads", "1", "--out", str(folder / "run")]) == 0
    assert "[/b]\\x1b[2J/run/model" in capsys.readouterr().err


def test_texts_whose_names_are_no_text(made: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    books = tmp_path / "books"
    books.mkdir()
    for number in range(3):
        (books / os.fsdecode(f"{number}".encode() + b"\xff.txt")).write_text(f"Once {number} upon a time. " * 40)
    tiny = ["--window", "64", "--layers", "1", "--hidden", "8", "--heads", "1", "--steps", "1", "--eval-samples", "1"]
    assert main(["train", "text", str(books), *tiny, "--threads", "1", "--out", str(tmp_path / "run")]) == 0
    for command, name in (("score", "s.csv"), ("embed", "v.npz"), ("embed", "v.parquet")):
        assert main([command, str(tmp_path / "run"), str(books), "--output", str(tmp_path / name)]) == 0
    assert f"{books}/0\\udcff.txt," in (tmp_path / "s.csv").read_text()
    assert parquet.read_table(tmp_path / "v.parquet").to_pydict()["name"][0] == f"{books}/0\\udcff.txt"


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\xff", b"[]", b"[" * 100_000, b'{"a": "\xff"}'])
def test_no_text_in_a_model_folder(
    name: str, content: bytes, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With checksums the file is named; without, a line says that no model can be loaded."""
    model = tmp_path / "model"
    shutil.copytree(made / "model", model)
    (model / name).write_bytes(content)
    said = complaint(["score", model, made / "some.fasta"], capsys)
    assert said.startswith(f"{model}: {name} is not what was written; ")
    (model / "files.json").unlink()
    code = main(["score", str(model), str(made / "some.fasta")])
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) in ((2, 1), (0, 0))
    assert code == 2 or name == "tokenizer_config.json"  # without which the tokenizer is whole
    (model / name).unlink()
    shutil.copy(made / "model" / name, model / name)
    (model / "files.json").write_bytes(content)
    assert "files.json is no list of files with their checksums" in complaint(
        ["score", model, made / "some.fasta"], capsys
    )
    assert model_folder(model) == model


# Bombs and disks ------------------------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (10_000, 10_000, "claims to be 10,000 x 10,000 pixels; at most 67,108,864 are read"),  # PIL would warn
        (100_000, 100_000, "cannot be read (Image size (10000000000 pixels) exceeds limit of 178956970 pixels"),
        (1000, 1000, "cannot be read (image file is truncated"),
        (0, 1, "cannot be read ("),
    ],
)
def test_pictures_that_claim_too_much(
    width: int, height: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bomb.png").write_bytes(png(width, height))
    assert complaint(["train", "image", tmp_path], capsys).startswith(f"{tmp_path}/bomb.png: {message}")


def test_an_idx_file_that_goes_on_is_not_read_to_its_end(tmp_path: Path) -> None:
    import gzip

    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">III", 1, 2, 2) + b"\0" * (1 << 24))
    with pytest.raises(errors.DataError) as caught:
        load_images(tmp_path / "bomb.gz")
    assert str(caught.value).endswith("bomb.gz: should hold [1, 2, 2] bytes, got 5; the file is damaged")
    (tmp_path / "huge").write_bytes(b"\0\0\x08\x04" + struct.pack(">IIII", 2**16, 2**16, 2**16, 2**16))
    with pytest.raises(errors.DataError, match=r"should hold \[65536, 65536, 65536, 65536\] bytes, got 0"):
        load_images(tmp_path / "huge")


@contextmanager
def no_room() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_no_room_for_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.txt").write_text("words " * 10_000)
    (tmp_path / "some.fasta").write_text(">p\n" + "MKV" * 10_000 + "\n")
    (tmp_path / "few.fasta").write_text(">p\n" + "MKV" * 10 + "\n")
    np.savez(tmp_path / "some.npz", images=np.zeros((9, 99, 99), np.uint8))
    words = f"{tempfile.gettempdir()}: has no room for the data while they are in use (File too large); set TMPDIR to "
    loads = {
        "text": lambda: load_text([tmp_path / "some.txt"]),
        "tokens": lambda: load_text([tmp_path / "some.txt"], protein_tokenizer()),
        "proteins": lambda: load_proteins([tmp_path / "some.fasta"]),
        "few": lambda: load_proteins([tmp_path / "few.fasta"]),  # fails when the buffer is flushed
        "images": lambda: load_images(tmp_path / "some.npz"),
    }
    monkeypatch.delenv("TMPDIR", raising=False)
    for name, load in loads.items():
        with no_room(), pytest.raises(errors.DataError) as caught:
            load()
        assert str(caught.value) == words + "another folder", name


def test_no_folder_for_the_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: Any) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("TMPDIR", "/no/such")
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    assert complaint(["train", "protein"], capsys) == (
        "/no/such: has no room for the data while they are in use (No usable temporary directory found); set TMPDIR to "
        "another folder"
    )
