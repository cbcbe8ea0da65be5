"""How commands end: what the shell gets, and the one line that says why."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad.training
from subquad.cli import main
from subquad.cli.common import load_tokenizer
from subquad.errors import CheckpointError
from subquad.models import SubquadConfig
from subquad.training import Result


def ending(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("subquad.data.load_proteins", fail)
    return main(["train", "protein"])


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    advice = "try a smaller model, window or batch\n"
    assert ending(MemoryError("of Python"), monkeypatch) == 2
    assert capsys.readouterr().err == f"subquad: error: out of memory (of Python); {advice}"
    assert ending(RuntimeError("can't allocate memory: 9 bytes"), monkeypatch) == 2
    assert capsys.readouterr().err == f"subquad: error: out of memory (can't allocate memory: 9 bytes); {advice}"


def test_a_bug_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a bug of ours"):
        ending(RuntimeError("a bug of ours"), monkeypatch)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command can be there without its extra, if what it is made of came with something else."""
    assert ending(ModuleNotFoundError("No module named 'Bio.SeqIO'", name="Bio.SeqIO"), monkeypatch) == 2
    assert capsys.readouterr().err == "subquad: error: the command line needs Bio; pip install 'subquad[cli]'\n"


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(KeyboardInterrupt(), monkeypatch) == 130

    def app(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt  # outside of what typer catches

    capsys.readouterr()
    monkeypatch.setattr("subquad.cli.app", app)
    assert main([]) == 130
    assert capsys.readouterr().err == "subquad: error: interrupted\n"


def test_under_torchrun_the_first_process_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert ending(MemoryError(), monkeypatch) == 2
    assert capsys.readouterr().err == ""


def result(**changes: Any) -> Result:
    made: dict[str, Any] = {
        "folder": "run",
        "step": 7,
        "metrics": {"eval_loss": 2.0, "eval_accuracy": 0.25},
        "unigram_loss": 3.0,
        "unigram_accuracy": 0.125,
        "unit": "residue",
        "seconds_per_step": None,
        "peak_memory": None,
        "stopped_by": None,
    }
    return Result(**{**made, **changes})


def trained(ended: Result, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(subquad.training, "train", lambda *_, **__: ended)
    return main(["train", "protein", "--out", str(folder)])


def test_a_run_that_was_stopped(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(result(stopped_by=signal.SIGTERM), monkeypatch, tmp_path) == 143
    assert capsys.readouterr().err == "stopped and saved at step 7; the same command with --resume goes on\n"


def test_a_run_that_is_complete(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(result(), monkeypatch, tmp_path) == 0
    assert capsys.readouterr().err == (
        "held out:         loss 2.0000, perplexity 7.389, accuracy 25.00 %\n"
        "unigram baseline: loss 3.0000, perplexity 20.086, accuracy 12.50 %\n"
        "model: run/model  plot: run/loss.png\n"
    )
    monkeypatch.setenv("RANK", "1")
    assert trained(result(stopped_by=signal.SIGTERM), monkeypatch, tmp_path) == 0
    assert capsys.readouterr().err == ""


def test_a_checkpoint_knows_the_tokenizers_of_proteins_and_bytes_only(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, SubquadConfig(domain="protein")).encode("MKV") == [1, 14, 12, 21]
    bytewise = load_tokenizer(tmp_path, SubquadConfig(domain="text", vocab_size=260))
    assert bytewise.decode(bytewise.encode("naïve"), skip_special_tokens=True) == "naïve"
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path, SubquadConfig(domain="text", vocab_size=261))
    assert str(caught.value) == (
        "the checkpoint was trained with a tokenizer that is saved when the run ends; finish the run"
    )


def test_what_is_generated_when_it_ends_within_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    from subquad.cli.common import Loaded
    from subquad.cli.generate import Stream
    from subquad.data import byte_tokenizer

    tokenizer = byte_tokenizer()
    start, first, second = (tokenizer.encode(text)[-1] for text in ("", "a", "b"))
    model = type("Model", (), {"config": SubquadConfig(domain="text", vocab_size=260, bos_token_id=start)})
    cut = [tokenizer.encode("ä")[-2]]
    with Stream(Loaded(model, tokenizer, "text"), 1, 9, live=True) as stream:
        for tokens in ([start, first], [second], cut):
            stream.put(torch.tensor([tokens]))
        stream.end()
        stream.end()
    assert stream.count == 2
    assert capsys.readouterr().out.rstrip("\n") == "ab\ufffd"
