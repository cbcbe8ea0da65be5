"""`subquad convert`."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import subquad
from subquad.cli import main
from tiny_heads import llama

LETTERS = "abcdefghijklmnopqrst "
KILLS = 30
OPTIONS = ["--length", "64", "--window", "32", "--sinks", "1", "--features", "8", "--steps", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("convert")
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    llama().float().save_pretrained(folder / "llama")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(folder / "llama")
    generator = random.Random(0)
    (folder / "some.txt").write_text("".join(generator.choices(LETTERS, k=600)))
    return folder


def command(folder: Path, out: Path, *options: str) -> list[str]:
    return ["convert", str(folder / "llama"), str(folder / "some.txt"), "--out", str(out), *OPTIONS, *options]


def test_command_is_the_function(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    assert main(command(folder, out, "--budget", "exact 50%", "--kinds", "features, exact", "--num", "3")) == 0
    shown = capsys.readouterr()
    text = (folder / "some.txt").read_text()
    ids = AutoTokenizer.from_pretrained(folder / "llama")(text, return_tensors="pt")["input_ids"]
    batches = [ids[:, start : start + 64] for start in (0, 3 * 64, 6 * 64)]  # spread over nine stretches
    model = llama().float()
    report = subquad.convert(
        model, batches, budget="exact 50%", kinds=["features", "exact"], window=32, sinks=1, num_features=8, steps=2
    )
    assert shown.out.strip() == str(report)
    assert shown.err.strip() == f"the converted model is in {out}"
    assert json.loads((out / "conversion.json").read_text()) == json.loads(report.as_json())
    with torch.no_grad():
        assert torch.equal(subquad.load(out)(ids[:, :64]).logits, model(ids[:, :64]).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("abc")["input_ids"] == [0, 1, 2]
    assert main(["generate", str(out), "--prompt", "abc", "--length", "9", "--greedy"]) == 0
    prompt = torch.tensor([[0, 1, 2]])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    assert capsys.readouterr().out == tokenizer.decode(made[0], skip_special_tokens=True) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    (out / "conversion.json").write_text("{}")
    assert complaint(["generate", str(out), "--prompt", "abc"], capsys) == (
        f"{out}: conversion.json is not what was written; use a copy that is whole, or --resume the run that made it"
    )


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.strip().removeprefix("subquad: error: ")


def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, new = folder / "llama", folder / "some.txt", tmp_path / "new"
    assert complaint(["convert", str(folder / "no"), str(text), "--out", str(new)], capsys) == (
        f"{folder / 'no'}: does not exist; give a run folder or a model folder"
    )
    assert complaint(command(folder, folder), capsys) == f"--out {folder}: exists already; give another name"
    assert complaint([*command(folder, new), "--length", "700"], capsys) == (
        f"{text}: holds no stretch of 700 tokens; give longer texts, or a smaller --length"
    )
    assert complaint([*command(folder, new), "--kinds", "windw"], capsys) == (
        "convert: with budget 'constant': every kind must be one of window, features, got 'windw' "
        "(did you mean 'window'?)"
    )
    assert main(command(folder, new)) == 0
    capsys.readouterr()
    assert complaint(["convert", str(new), str(text), "--out", str(tmp_path / "other")], capsys) == (
        f"{new}: is a model of subquad already (subquad_converted); give one of transformers"
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["Nothing"]}
    (bare / "config.json").write_text(json.dumps(config))
    assert complaint(["convert", str(bare), str(text), "--out", str(tmp_path / "other")], capsys) == (
        f"{bare}: its config.json names no class of transformers (architectures: 'Nothing')"
    )
    assert not (tmp_path / "other").exists()


def test_other_options_do_not_go_on_with_what_is_unfinished(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = tmp_path / "new.unfinished"
    unfinished.mkdir()
    save_file({"x": torch.zeros(1)}, unfinished / "sensitivity.safetensors", {"fingerprint": "another"})
    assert complaint(command(folder, tmp_path / "new"), capsys) == (
        f"convert: {unfinished} holds a conversion of another model, with other batches or other options; give the "
        "same again, or another folder"
    )


@pytest.mark.full
def test_thirty_kills(folder: Path, tmp_path: Path) -> None:
    """Killed at any moment, the same command goes on, and ends with the same bytes."""
    words = command(folder, tmp_path / "whole", "--budget", "exact 25%", "--kinds", "window,features,exact")
    assert run(words).wait() == 0
    want = contents(tmp_path / "whole")
    chance, kills = random.Random(1), 0
    for number in range(4 * KILLS):
        out = tmp_path / f"killed{number}"
        words[words.index("--out") + 1] = str(out)
        kills += killed_after(run(words), out.with_name(f"{out.name}.unfinished"), chance.randrange(4), chance.random())
        if not out.exists():
            assert run(words).wait() == 0
        assert contents(out) == want
        if kills == KILLS:
            return
    raise AssertionError(f"{kills} kills only")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_after(process: "subprocess.Popen[bytes]", unfinished: Path, files: int, seconds: float) -> bool:
    """Kills the process some moments after so many files are there; whether it was still alive."""
    while process.poll() is None and len(list(unfinished.glob("*.safetensors"))) < files:
        time.sleep(0.001)
    time.sleep(0.2 * seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def run(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "subquad", *words], stdout=subprocess.DEVNULL)
