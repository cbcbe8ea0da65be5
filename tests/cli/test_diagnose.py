"""`subquad diagnose`, on runs of ours and on Hugging Face models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertTokenizer

import tiny_folders
import tiny_heads
from subquad import diagnose
from subquad.cli import main
from subquad.cli.common import load_model
from subquad.conversion import swap_attention
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


def test_command_on_a_converted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own features and its exact heads are judged, in windows of text that begin with the start token."""
    model, text, numbers = tiny_folders.save_converted(tmp_path / "model"), tmp_path / "some.txt", tmp_path / "x.json"
    text.write_text("so it goes on and on and no end is near " * 3)
    command = ["diagnose", str(tmp_path / "model"), str(text), "--length", "40", "--num", "2", "--rows", "9"]
    assert main([*command, "--json", str(numbers)]) == 0
    tokens = tiny_folders.letters(front=False)(text.read_text())["input_ids"]
    windows = [[tiny_folders.START, *tokens[start : start + 39]] for start in (0, 39)]
    want = diagnose(model.base_model, [{"input_ids": torch.tensor(windows)}], rows=9)
    got = json.loads(numbers.read_text())["layers"]
    where = "self_attn.subquad_attention.parts"
    names = [f"layers.0.{where}.favor0", f"layers.0.{where}.softmax1", f"layers.1.{where}.favor1"]
    assert [layer["name"] for layer in got] == names
    assert [layer["own"] for layer in got] == [True, False, True]
    for one, other in zip(got, want.layers, strict=True):
        assert one["far_share"] == (None if not other.own else pytest.approx(other.far_share, rel=1e-6))
        errors = [head.error for head in other.heads]
        assert [head["error"] for head in one["heads"]] == pytest.approx(errors, rel=1e-6)
    shown = capsys.readouterr().out
    assert shown.endswith(
        f"{want.far_field}\n"
        "mechanisms:\n"
        "  layer 0: mixed, favor on key head 0; softmax on key head 1\n"
        "  layer 1: mixed, window on key head 0; favor on key head 1\n"
    )


def test_windows_are_no_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without features is not judged as if it were exact."""
    tiny_folders.save_llama(tmp_path)
    swap_attention(tiny_heads.llama(), "window", window=4).save_pretrained(tmp_path)
    (tmp_path / "some.txt").write_text("so it goes")
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path), str(tmp_path / "some.txt"), "--length", "8"]) == 2
    assert capsys.readouterr().err == "subquad: error: diagnose: LlamaModel has no favor or softmax attention\n"


def test_command_on_residues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of FASTA records, the first tokens; special ones stand around them."""
    model, fasta, numbers = tiny_folders.save_esm(tmp_path / "esm"), tmp_path / "x.fasta", tmp_path / "x.json"
    fasta.write_text(">one\nMKVLATGGSTYW\n>two\nmkv\n")
    command = ["diagnose", str(tmp_path / "esm"), str(fasta), "--length", "10", "--near", "4", "--rows", "9"]
    assert main([*command, "--json", str(numbers)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "esm")
    batches = [torch.tensor([tokenizer(text)["input_ids"]]) for text in ("MKVLATGG", "MKV")]
    given = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
    want = diagnose(model.base_model, given, rows=9, near=4).layers[0].heads
    got = json.loads(numbers.read_text())["layers"][0]["heads"]
    assert [head["entropy"] for head in got] == pytest.approx([head.entropy for head in want], rel=1e-5)


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
