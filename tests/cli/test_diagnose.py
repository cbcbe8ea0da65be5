"""`subquad diagnose`, on runs of ours and on Hugging Face models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer

from subquad import diagnose
from subquad.cli import main
from subquad.cli.common import load_model
from subquad.data import encode
from tiny_hugging_face import bert
from tiny_models import TINY_RUN


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face model with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "it", "goes"]
    bert().float().save_pretrained(folder / "bert")
    BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder / "bert")
    (folder / "some.txt").write_text("so it goes " * 20)
    return folder / "bert", folder / "some.txt"


def test_command_on_a_hugging_face_model(
    words: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = map(str, words)
    picture, numbers = tmp_path / "heads.png", tmp_path / "heads.json"
    command = ["diagnose", model, text, "--length", "24", "--num", "2", "--rows", "9", "--tolerance", "0.2"]
    command += ["--features", "16", "--near", "4", "--sinks", "1", "--estimator", "hyperbolic"]
    assert main([*command, "--output", str(picture), "--json", str(numbers)]) == 0
    shown = capsys.readouterr()
    record = json.loads(numbers.read_text())
    assert (record["rows"], record["tolerance"], record["sequences"], len(record["layers"])) == (9, 0.2, 2, 3)
    kinds = {
        tuple(layer[name] for name in ("num_features", "near", "sinks", "estimator")) for layer in record["layers"]
    }
    assert kinds == {(16, 4, 1, "hyperbolic")}
    assert record["summary"] in " ".join(shown.out.split())
    assert f"{record['layers'][2]['heads'][3]['error']:.3f}" in shown.out
    assert shown.err.splitlines() == [f"written to {picture}", f"written to {numbers}"]
    assert picture.stat().st_size > 5000


def test_command_on_a_run_is_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences of different lengths, padded into one batch: as each of them alone."""
    run, fasta = tmp_path / "run", tmp_path / "some.fasta"
    assert main(["train", "protein", "--out", str(run), "--steps", "1", *TINY_RUN, "--option", "near=4"]) == 0
    records = ["MKVLAT" * 10, "GGSTYW" * 4, "PQRN" * 3]
    fasta.write_text("".join(f">{i}\n{sequence}\n" for i, sequence in enumerate(records)))
    assert main(["diagnose", str(run), str(fasta), "--length", "40", "--json", str(tmp_path / "x.json")]) == 0
    got = json.loads((tmp_path / "x.json").read_text())["layers"][0]["heads"]
    loaded = load_model(run, head=False)
    batches = [torch.from_numpy(encode(s).astype("int64")) for s in records]
    batches = [torch.cat([torch.tensor([loaded.start]), ids])[:40] for ids in batches]
    assert [len(ids) for ids in batches] == [40, 25, 13]
    want = diagnose(loaded.model, [ids[None] for ids in batches]).layers[0].heads
    for one, other in zip(got, want, strict=True):
        assert one["entropy"] == pytest.approx(other.entropy, rel=1e-5)
        assert one["error"] == pytest.approx(other.error, rel=1e-3)
    assert "1/1" not in capsys.readouterr().out


def test_mistakes_of_the_command(words: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = map(str, words)
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        ([model, text, "--length", "513"], "--length: the model takes at most 512 tokens, got 513"),
        (
            [model, text, "--estimator", "sharp"],
            "diagnose: estimator must be one of positive, hyperbolic, trigonometric",
        ),
        ([model, str(tmp_path / "no.txt")], "no.txt: no such file"),
        ([str(tmp_path), text], "holds no model"),
    ):
        assert main(["diagnose", *arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1
        assert message in shown.err
