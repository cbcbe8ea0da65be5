"""`subquad bill`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from subquad.bench.bill.rows import NO_FAR, NOTHING, ROWS, WINDOW
from subquad.cli import main
from subquad.conversion import swap_attention
from tiny_heads import bert, llama

LETTERS = "abcdefghijklmnopqrst #"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two converted models, their tokenizer and a text."""
    folder = tmp_path_factory.mktemp("bill")
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    features: dict[str, Any] = {"num_features": 8, "near": 16, "sinks": 1}
    for name, model in (("llama", llama()), ("bert", bert())):
        swap_attention(model.float(), "favor", **features).save_pretrained(folder / name)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ", mask_token="#", pad_token=" ")
        fast.save_pretrained(folder / name)
    llama().save_pretrained(folder / "plain")
    fast.save_pretrained(folder / "plain")
    (folder / "some.txt").write_text("".join(random.Random(0).choices(LETTERS[:-1], k=900)))
    return folder


def test_of_a_causal_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bill.json"
    words = ["bill", str(folder / "llama"), str(folder / "some.txt"), "--length", "300", "--num", "2"]
    words += ["--speed", "32,64", "--output", str(output)]
    assert main(words) == 0
    shown = capsys.readouterr()
    found = json.loads(output.read_text())
    assert list(found["rows"]) == list(ROWS)
    assert [cost["length"] for cost in found["speed"]] == [32, 32, 64, 64]
    assert found["policy"] == {f"model.layers.{layer}.self_attn": ["favor", "favor"] for layer in range(2)}
    assert found["plan"]["sizes"] == [[1, 300]] * 2
    assert "processor" in found["machine"]
    for words_of_tables in (
        "What it costs",
        "What it remembers, by the tokens since then",
        "What it saves",
        "How they go on with the first text",
        "What every key head is",
        f"{WINDOW} ({found['rows'][WINDOW]['window']})",
        f"{found['rows'][NO_FAR]['ratio']:.4f} ±{found['rows'][NO_FAR]['error']:.4f}",
        "copy 150",
        "key 150",
        NOTHING,
    ):
        assert words_of_tables in " ".join(shown.out.split()), words_of_tables
    assert shown.err.strip() == f"numbers: {output}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bill.json"]
    before = output.read_text()
    assert main(words) == 0  # nothing is left to do
    assert output.read_text() == before
    assert capsys.readouterr().out == shown.out


def test_of_an_encoder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bill.json"
    words = ["bill", str(folder / "bert"), str(folder / "some.txt"), "--length", "100", "--num", "4"]
    assert main([*words, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert list(found["rows"]) == [row for row in ROWS if row != WINDOW]
    assert found["rows"]["exact"]["neighbours_kept"] == 1
    assert 0 <= found["rows"]["exact"]["accuracy"] < 0.5
    shown = " ".join(capsys.readouterr().out.split())
    assert "masked tokens guessed cosine, mean smallest neighbours kept" in shown
    assert f"{found['rows']['converted']['cosine']:.4f}" in shown


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.strip().removeprefix("subquad: error: ")


def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = str(folder / "some.txt"), str(tmp_path / "bill.json")
    llama_and_text = ["bill", str(folder / "llama"), text, "--output", output]
    plain = folder / "plain"
    assert complaint(["bill", str(plain), text, "--output", output], capsys) == (
        f"bill: {plain} is no converted model; make one of it with subquad convert"
    )
    assert complaint([*llama_and_text, "--length", "901"], capsys) == (
        f"{text}: holds no stretch of 901 tokens; give longer texts, or a smaller --length"
    )
    assert complaint([*llama_and_text, "--length", "100", "--speed", "64,no"], capsys).startswith("--speed")
    assert complaint([*llama_and_text, "--num", "0"], capsys) == "--num: must be at least 1, got 0"
    assert complaint(["bill", str(folder / "llama"), text, "--output", str(tmp_path / "no" / "b.json")], capsys)
    assert not list(tmp_path.iterdir())
