"""The command line, as a user meets it."""

import csv
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from subquad import errors
from subquad.cli import app, main
from subquad.cli.common import load_model
from subquad.data import encode, load_proteins, read_fasta
from subquad.models import embeddings, log_likelihoods
from subquad.training import options

TINY = ["--window", "64", "--layers", "1", "--hidden", "16", "--heads", "2", "--eval-samples", "2", "--threads", "1"]
FAVOR = ["--option", "num_features=8", "--option", "near=8"]


def train(kind: str, out: Path, *arguments: str, steps: int = 2) -> None:
    assert main(["train", kind, *arguments, "--out", str(out), "--steps", str(steps), *TINY]) == 0


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A causal and a masked protein model, one of text, one of images."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "books").mkdir()
    for number in range(3):
        (folder / "books" / f"{number}.txt").write_text(f"Once upon a time, naïve {number}. " * 200)
    images = np.random.default_rng(0).integers(0, 256, (60, 4, 4)).astype(np.uint8)
    np.savez(folder / "images.npz", images=images)
    made = {name: folder / name for name in ("causal", "masked", "text", "image")}
    train("protein", made["causal"], *FAVOR)
    train("protein", made["masked"], *FAVOR, "--objective", "masked", "--layout", "crops")
    train("text", made["text"], str(folder / "books"), "--attention", "linear")
    images_of = ["train", "image", str(folder / "images.npz"), "--levels", "4", "--out", str(made["image"])]
    assert main([*images_of, "--steps", "2", *TINY[2:], *FAVOR]) == 0
    return {**made, "books": folder / "books", "images": folder / "images.npz"}


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "some.fasta"
    records = list(read_fasta(Path(str(load_proteins.__globals__["SAMPLE"]))))[:5]
    path.write_text("".join(f">{name}\n{sequence[:150]}\n" for name, sequence in records))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# Help -----------------------------------------------------------------------------------------------------------------

COMMANDS = [
    [],
    ["train"],
    ["train", "protein"],
    ["train", "text"],
    ["train", "image"],
    ["generate"],
    ["score"],
    ["embed"],
    ["spectrum"],
    ["diagnose"],
    ["calibrate"],
    ["bench"],
]


@pytest.mark.parametrize("command", [*COMMANDS, ["demo"], ["doctor"], ["bench", "fidelity"]], ids=" ".join)
def test_help_shows_an_example_that_parses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    example = re.search(r"Example: subquad (.*)$", shown)
    assert example is not None
    words = example[1].split()
    assert words[: len(command)] == command
    known = set(re.findall(r"--[a-z-]+", shown))
    assert all(word in known for word in words if word.startswith("--")) or not command


def test_every_command_is_documented() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for command in [
        *(getattr(c.callback, "__name__", "") for c in app.registered_commands),
        "train protein",
        "bench fidelity",
    ]:
        assert f"subquad {command}" in readme


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import subquad

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == subquad.__version__


def test_doctor_compares_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "favor: native engine agrees with torch" in shown
    assert "linear: native engine agrees with torch" in shown


def test_doctor_tells_a_wrong_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    doctor: Any = importlib.import_module("subquad.cli.doctor")  # the package has the command under this name
    for difference in (1e-3, float("nan")):
        monkeypatch.setattr(doctor, "_compare", lambda name, d=difference: doctor.Comparison(name, d, 1.0))
        assert main(["doctor"]) == 1
        assert "DIFFERS from torch" in capsys.readouterr().out


def test_doctor_says_why_there_is_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from subquad.kernels.cpu import library
    from subquad.kernels.engines import ENGINES

    monkeypatch.setattr(library, "AVAILABLE", False)
    monkeypatch.setattr(library, "WHY_MISSING", "no such luck")
    monkeypatch.setitem(ENGINES, "cpu", replace(ENGINES["cpu"], missing="no such luck"))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "The native CPU engine is missing: no such luck." in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "dtypes float32, bfloat16, float16 float16, bfloat16, float32, float64" in lines
    assert "signed features no yes" in lines
    assert "without a far field yes yes" in lines
    assert "here no: no such luck yes" in lines


# Work -----------------------------------------------------------------------------------------------------------------


def test_scores_are_the_models(runs: dict[str, Path], fasta: Path, tmp_path: Path) -> None:
    assert main(["score", str(runs["causal"]), str(fasta), "--output", str(tmp_path / "s.csv")]) == 0
    rows = rows_of(tmp_path / "s.csv")
    sequences = [torch.from_numpy(encode(s).astype(np.int64)) for _, s in read_fasta(fasta)]
    wanted = log_likelihoods(load_model(runs["causal"]).model, sequences, start=1)
    assert [row["name"] for row in rows] == [name for name, _ in read_fasta(fasta)]
    for row, scores in zip(rows, wanted, strict=True):
        assert int(row["length"]) == len(scores)
        assert float(row["log_likelihood"]) == pytest.approx(float(scores.sum()), abs=1e-3)
        assert float(row["perplexity"]) == pytest.approx(float((-scores.mean()).exp()), rel=1e-4)


def test_pseudo_scores(runs: dict[str, Path], fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(runs["masked"]), str(fasta)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "name,length,pseudo_log_likelihood,perplexity"
    assert len(shown) == 6
    assert main(["score", str(runs["masked"]), str(fasta), "--exact", "--output", str(tmp_path / "e.csv")]) == 0
    assert all(10 < float(row["perplexity"]) < 100 for row in rows_of(tmp_path / "e.csv"))


def test_embeddings_in_both_formats(runs: dict[str, Path], fasta: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    sequences = [torch.from_numpy(encode(s).astype(np.int64)) for _, s in read_fasta(fasta)]
    model = load_model(runs["causal"], head=False).model
    for flag, mean in ((), True), (("--per-residue",), False):
        for suffix in ("npz", "parquet"):
            assert (
                main(["embed", str(runs["causal"]), str(fasta), "--output", str(tmp_path / f"v.{suffix}"), *flag]) == 0
            )
        wanted = embeddings(model, sequences, start=1, mean=mean)
        wanted = torch.stack(wanted) if mean else torch.cat(wanted)
        arrays = np.load(tmp_path / "v.npz")
        assert np.allclose(arrays["embeddings"], wanted, atol=1e-5)
        assert arrays["names"].tolist() == [name for name, _ in read_fasta(fasta)]
        table = parquet.read_table(tmp_path / "v.parquet").to_pydict()
        assert np.allclose(np.array(table["embedding"]), wanted, atol=1e-5)
        if not mean:
            assert arrays["lengths"].tolist() == [len(s) for s in sequences]
            assert table["position"][: len(sequences[0]) + 1] == [*range(1, len(sequences[0]) + 1), 1]


def test_generated_proteins(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", str(runs["causal"]), "--prompt", "MKV"]
    out = tmp_path / "new.fasta"
    assert main([*base, "--length", "90", "--endless", "--output", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert main([*base, "--length", "90", "--endless"]) == 0
    streamed = capsys.readouterr().out.replace("\n", "")
    assert [sequence for _, sequence in read_fasta(out)] == [streamed]
    assert len(streamed) == 93
    assert re.search(r"tokens/s", shown.err)
    assert main([*base, "--length", "40", "--num", "3", "--seed", "1", "--output", str(out)]) == 0
    several = [sequence for _, sequence in read_fasta(out)]
    assert len(several) == 3
    assert all(s.startswith("MKV") and len(s) <= 43 for s in several)
    assert main([*base, "--length", "40", "--num", "3", "--seed", "1", "--output", str(out)]) == 0
    assert [sequence for _, sequence in read_fasta(out)] == several
    greedy = []
    for _ in range(2):
        capsys.readouterr()
        assert main([*base, "--length", "10", "--greedy"]) == 0
        greedy.append(capsys.readouterr().out)
    assert greedy[0] == greedy[1]


def test_text_and_images(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    assert (
        main(
            ["generate", str(runs["text"]), "--prompt", "Once é", "--length", "8", "--output", str(tmp_path / "a.txt")]
        )
        == 0
    )
    assert (tmp_path / "a.txt").read_text().startswith("Once é")
    assert main(["generate", str(runs["text"]), "--prompt", "Once é", "--length", "8"]) == 0
    assert capsys.readouterr().out.startswith("Once é")
    assert main(["score", str(runs["text"]), str(runs["books"]), "--output", str(tmp_path / "t.csv")]) == 0
    assert len(rows_of(tmp_path / "t.csv")) == 3
    assert main(["generate", str(runs["image"]), "--num", "3", "--output", str(tmp_path / "a.png")]) == 0
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (8, 8)
    assert main(["generate", str(runs["image"]), "--num", "3", "--output", str(tmp_path / "a.npz")]) == 0
    assert np.load(tmp_path / "a.npz")["images"].shape == (3, 4, 4)
    assert main(["embed", str(runs["image"]), str(runs["images"]), "--output", str(tmp_path / "i.npz")]) == 0
    assert np.load(tmp_path / "i.npz")["embeddings"].shape == (60, 16)


def test_a_head_of_its_own_is_left_out_where_nobody_needs_it(runs: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(runs["causal"]).model
    config = type(model.config).from_dict(model.config.to_dict() | {"tie_word_embeddings": False})
    untied = type(model)(config)
    untied.save_pretrained(tmp_path)
    body = load_model(tmp_path, head=False).model
    assert torch.equal(body.embed_tokens.weight, untied.model.embed_tokens.weight)
    head = load_model(tmp_path).model.lm_head.weight
    assert torch.equal(head, untied.lm_head.weight)
    assert not torch.equal(head, body.embed_tokens.weight)


def test_pixels_are_what_was_sampled(tmp_path: Path) -> None:
    """Four levels as grey values, three pictures in a square of four, the last one black."""
    from PIL import Image

    from subquad.cli.generate import _write_images
    from subquad.data.vocabulary import SPECIALS

    config = SimpleNamespace(vocab_size=len(SPECIALS) + 4, image_shape=(1, 2))
    loaded: Any = SimpleNamespace(model=SimpleNamespace(config=config))
    samples = [torch.tensor(levels) + len(SPECIALS) for levels in ([0, 1], [2, 3], [3, 0])]
    _write_images(loaded, samples, tmp_path / "a.npz")
    assert np.load(tmp_path / "a.npz")["images"].tolist() == [[[0, 85]], [[170, 255]], [[255, 0]]]
    _write_images(loaded, samples, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert np.asarray(picture).tolist() == [[0, 85, 170, 255], [255, 0, 0, 0]]


def test_checkpoints_can_be_asked(
    runs: dict[str, Path], fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = runs["causal"] / "checkpoints" / "checkpoint-2"
    assert main(["score", str(checkpoint), str(fasta)]) == 0
    assert "not complete" not in capsys.readouterr().err
    shutil.copytree(runs["causal"] / "checkpoints", tmp_path / "run" / "checkpoints")
    assert main(["score", str(tmp_path / "run"), str(fasta)]) == 0
    taken = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    assert f"the run is not complete: taking {taken}" in capsys.readouterr().err.replace("\n", "")


def test_a_hugging_face_tokenizer(runs: dict[str, Path], tmp_path: Path) -> None:
    from subquad.data import protein_tokenizer

    protein_tokenizer().save_pretrained(tmp_path / "tokens")
    books = [
        "train",
        "text",
        str(runs["books"]),
        "--tokenizer",
        str(tmp_path / "tokens"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*books, "--steps", "1", *TINY, *FAVOR]) == 0
    assert load_model(tmp_path / "run").tokenizer("MKV")["input_ids"] == [1, 14, 12, 21]


def test_layers_can_differ(tmp_path: Path) -> None:
    arguments = ["train", "protein", "--out", str(tmp_path / "run"), "--steps", "1", *TINY, "--layers", "2"]
    assert main([*arguments, "--attention", "softmax,favor"]) == 0
    assert [m.name for m in load_model(tmp_path / "run").model.mechanisms()] == ["softmax", "favor"]


def test_resuming_needs_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    train("protein", out, *FAVOR)
    assert main(["train", "protein", "--out", str(out), "--resume"]) == 0
    assert main(["train", "protein", "--out", str(out), "--resume", "--hidden", "64"]) == 2
    assert "was begun with other settings (hidden: 16 -> 64)" in capsys.readouterr().err


def test_the_record_of_a_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    train("protein", out, *FAVOR)
    read, read_record = [], options.read_record
    monkeypatch.setattr(options, "read_record", lambda path: read.append(path) or read_record(path))
    assert main(["train", "protein", "--out", str(out), "--resume"]) == 0
    assert read == [out / "run.json"]


@pytest.mark.parametrize("damage", ["weights", "config", "tokenizer", "layers", "start"])
def test_damaged_models_are_refused(
    damage: str, runs: dict[str, Path], fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["causal"] / "model", tmp_path / "model")
    (tmp_path / "model" / "files.json").unlink()  # as if it came from elsewhere, without checksums
    config = tmp_path / "model" / "config.json"
    if damage == "weights":
        (tmp_path / "model" / "model.safetensors").write_bytes(b"nonsense")
    elif damage == "config":
        config.write_text("[]")
    elif damage == "tokenizer":
        (tmp_path / "model" / "tokenizer.json").write_text("{")
    elif damage == "layers":
        config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    else:
        config.write_text(config.read_text().replace('"bos_token_id": 1', '"bos_token_id": 1000'))
    assert main(["score", str(tmp_path / "model"), str(fasta)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_changed_models_are_seen(runs: dict[str, Path], fasta: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(runs["causal"] / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["score", str(tmp_path / "model"), str(fasta)]) == 2
    assert "model.safetensors is not what was written" in capsys.readouterr().err


def test_several_samples_without_a_file_are_printed(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(runs["causal"]), "--num", "2", "--length", "5"]) == 0
    assert capsys.readouterr().out.count(">generated_") == 2


def test_sigterm_from_outside(tmp_path: Path) -> None:
    """The process saves, says how to go on, and exits as a stopped process does."""
    command = [sys.executable, "-m", "subquad", "train", "protein", "--out", str(tmp_path / "run"), *TINY, *FAVOR]
    command += ["--steps", "100000", "--log-every", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("step 3/"):
                os.kill(process.pid, signal.SIGTERM)
        code = process.wait()
    assert code == 128 + signal.SIGTERM
    assert re.match(r"stopped and saved at step \d+; the same command with --resume goes on", lines[-1])
    assert list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))


# Mistakes -------------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], str]] = {
    "command": (["trian"], "No such command 'trian'"),
    "option": (["train", "protein", "--stepps", "3"], "No such option: --stepps"),
    "number": (["train", "protein", "--steps", "many"], "Invalid value for '--steps': Input should be a valid integer"),
    "steps": (["train", "protein", "--steps", "0"], "train: steps must be a whole number of at least 1, got 0"),
    "attention": (["train", "protein", "--attention", "favr"], "unknown attention 'favr' (did you mean 'favor'?)"),
    "pair": (["train", "protein", "--option", "near"], "--option: must be NAME=VALUE such as num_features=128"),
    "unknown pair": (["train", "protein", "--option", "nera=3"], "favor: unknown option 'nera' (did you mean 'near'?)"),
    "no argument": (["score", "MODEL"], "Missing argument 'sequences'"),
    "file": (["train", "protein", "no.fasta"], "no.fasta: no such file"),
    "tokenizer": (["train", "text", "BOOKS", "--tokenizer", "no/such"], "--tokenizer no/such: cannot be loaded ("),
    "model": (["generate", "nothing"], "nothing: does not exist; give a run folder or a model folder"),
    "masked": (["generate", "MASKED"], "is a masked model, which cannot generate; train with --objective causal"),
    "temperature": (["generate", "MODEL", "--temperature", "0"], "--temperature: must lie between 0.01 and 100"),
    "top-p": (["generate", "MODEL", "--top-p", "2"], "--top-p: must lie above 0 and at most at 1, got 2.0"),
    "top-k": (["generate", "MODEL", "--top-k", "-1"], "--top-k: must be at least 0 (off), got -1"),
    "length": (["generate", "MODEL", "--length", "0"], "--length: must be at least 1, got 0"),
    "prompt": (["generate", "MODEL", "--prompt", "M1"], "--prompt: '1' at position 2 is no amino acid"),
    "image prompt": (["generate", "IMAGE", "--prompt", "x"], "--prompt: image models take none"),
    "image length": (["generate", "IMAGE", "--length", "3"], "--length: an image has as many pixels as it has"),
    "suffix": (["generate", "MODEL", "--output", "x.png"], "--output: must end in .fasta or .fa, got 'x.png'"),
    "folder": (["embed", "MODEL", "FASTA", "--output", "no/x.npz"], "--output no/x.npz: there is no folder no"),
    "num": (["generate", "MODEL", "--num", "0"], "--num: must be at least 1, got 0"),
    "seed": (["generate", "MODEL", "--seed", "99999999999"], "--seed: seed must be below 2**32"),
    "exact": (["score", "MODEL", "FASTA", "--exact"], "--exact and --passes are for masked models; this one is causal"),
    "csv": (["score", "MODEL", "FASTA", "--output", "x.tsv"], "--output: must end in .csv, got 'x.tsv'"),
    "passes": (["score", "MASKED", "FASTA", "--passes", "0"], "--passes: must be at least 1, got 0"),
    "levels": (["train", "image", "IMAGES", "--levels", "1"], "images: levels must be a whole number of at least 2"),
    "picture": (["diagnose", "MODEL", "FASTA", "--output", "x.txt"], "--output: must end in .png or .svg, got 'x.txt'"),
    "no folder": (["diagnose", "MODEL", "FASTA", "--output", "no/x.png"], "--output no/x.png: there is no folder no"),
    "json": (["diagnose", "MODEL", "FASTA", "--json", "x.txt"], "--json: must end in .json, got 'x.txt'"),
    "json folder": (["diagnose", "MODEL", "FASTA", "--json", "no/x.json"], "--json no/x.json: there is no folder no"),
    "diagnose length": (["diagnose", "MODEL", "FASTA", "--length", "0"], "--length: must be at least 1, got 0"),
    "diagnose num": (["diagnose", "MODEL", "FASTA", "--num", "0"], "--num: must be at least 1, got 0"),
    "rows": (["diagnose", "MODEL", "FASTA", "--rows", "0"], "diagnose: rows must be a whole number of at least 1"),
    "tolerance": (["diagnose", "MODEL", "FASTA", "--tolerance", "2"], "diagnose: tolerance must lie between 0 and 1"),
    "own features": (
        ["diagnose", "MODEL", "FASTA", "--near", "8"],
        "diagnose: near is for layers with exact attention, but all of these are FAVOR and are judged as they are",
    ),
    "no features": (["diagnose", "TEXT", "BOOKS"], "diagnose: SubquadModel has no favor or softmax attention"),
    "calibrate what": (["calibrate", "nothing", "FASTA", "--out", "x"], "nothing: does not exist; give a run folder"),
    "calibrate where": (["calibrate", "MODEL", "FASTA"], "Missing option '--out'"),
    "hub": (["train", "text", "hf:a", "hf:b"], "train text: give one hub dataset alone, got hf:a hf:b"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, runs: dict[str, Path], fasta: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"MODEL": runs["causal"], "MASKED": runs["masked"], "IMAGE": runs["image"]}
    names |= {"TEXT": runs["text"]}
    names |= {"FASTA": fasta, "BOOKS": runs["books"], "IMAGES": runs["images"]}
    before = sorted(tmp_path.rglob("*"))
    assert main([str(names.get(word, word)) for word in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("subquad: error: ")
    assert message in lines[0]
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written


def test_models_that_are_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["generate", str(tmp_path)]) == 2
    assert "its config.json names no class of transformers (architectures: '')" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "subquad"}')
    assert main(["generate", str(tmp_path)]) == 2
    assert "does not say whether it is for protein, text or image" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["generate", str(tmp_path)]) == 2
    assert "no model can be loaded from it" in capsys.readouterr().err


def test_our_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of others, where they come from matters too."""
    cli: Any = importlib.import_module("subquad.cli")

    def warn(*_: Any, **__: Any) -> int:
        warnings.simplefilter("default")
        warnings.warn("of no use", errors.FeatureWarning, stacklevel=1)
        warnings.warn("of others", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "app", warn)
    before = warnings.showwarning
    assert main([]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "subquad: warning: of no use"
    assert "UserWarning: of others" in lines[1]
    assert warnings.showwarning is before


@pytest.mark.full
def test_demo_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--steps", "4", "--window", "512"]) == 0
    shown = capsys.readouterr().out
    for row in ("held-out perplexity", "seconds per step", "peak memory", "decoding at 16,384", "cache at 1,024"):
        assert row in shown
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    (record,) = read_fasta(tmp_path / "protein.fasta")
    assert record[1][:60] in shown
    assert main(["demo", "--out", str(tmp_path), "--steps", "4", "--window", "512"]) == 0  # again, from what is there
    assert "training with favor" in capsys.readouterr().out
