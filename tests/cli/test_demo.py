"""What the demonstration says, from made-up results."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from subquad.bench import DecodeCost, Timing
from subquad.bench.recall import Result
from subquad.cli import main
from subquad.cli.demo import CONTEXTS, _table, _verdict

demo = sys.modules["subquad.cli.demo"]  # the package's name for it is the command

RESULTS: dict[str, Any] = {
    name: {
        "unigram_loss": math.log(20),
        "unigram_accuracy": 0.09876,
        "metrics": {"eval_perplexity": perplexity, "eval_accuracy": perplexity / 100},
        "seconds_per_step": seconds,
        "peak_memory": memory,
    }
    for name, perplexity, seconds, memory in (
        ("identity", 19.0, 0.1, 1_000_000),
        ("window", 15.9, 0.3, 2_000_000),
        ("softmax", 16.0, 0.8, 2_345_678_900),
        ("favor", 16.4, 0.5, None),
    )
}
COSTS = {
    "softmax": [
        DecodeCost(1024, Timing((0.001, 0.002, 0.003)), 1_000_000),
        DecodeCost(16_384, Timing((0.02,)), 16_000_000),
    ],
    "favor": [DecodeCost(1024, Timing((0.001,)), 250_000), DecodeCost(16_384, Timing((0.0012,)), 250_000)],
}


def rows_of(table: Any) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    lines = [line for line in out.getvalue().splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]


def test_the_table() -> None:
    table = _table(RESULTS, COSTS)
    assert [column.justify for column in table.columns] == ["left"] + 4 * ["right"]
    assert table.title == "residues by their frequency alone: perplexity 20.000, accuracy 9.88 %"
    assert rows_of(table) == [
        ["", "identity", "window", "softmax", "favor"],
        ["held-out perplexity", "19.000", "15.900", "16.000", "16.400"],
        ["held-out accuracy", "19.00 %", "15.90 %", "16.00 %", "16.40 %"],
        ["seconds per step", "0.100", "0.300", "0.800", "0.500"],
        ["peak memory, training", "1.0 MB", "2.0 MB", "2,345.7 MB", "unknown"],
        ["tokens/s at 1,024", "", "", "500", "1,000"],
        ["cache at 1,024", "", "", "1.0 MB", "0.2 MB"],
        ["tokens/s at 16,384", "", "", "50", "833"],
        ["cache at 16,384", "", "", "16.0 MB", "0.2 MB"],
    ]


def test_the_verdict() -> None:
    assert _verdict(RESULTS, COSTS) == (
        "Perplexity below the unigram baseline: identity 5.0 %, window 20.5 %, softmax 20.0 %, favor 18.0 %.\n"
        "A window does at least as well: so few steps on these proteins need nothing from far away.\n"
        "A training step with favor takes 1/1.60 of the time. Its decoding at 16,384 tokens takes 1.20 times what it "
        "takes at 1,024."
    )
    resumed = {**RESULTS, "softmax": {**RESULTS["softmax"], "seconds_per_step": None}}
    assert "training step" not in _verdict(resumed, COSTS)
    assert rows_of(_table(resumed, COSTS))[3] == ["seconds per step", "0.100", "0.300", "unknown", "0.500"]
    worse = {**RESULTS, "window": {**RESULTS["window"], "metrics": {"eval_perplexity": 18.0, "eval_accuracy": 0.1}}}
    assert _verdict(worse, COSTS).splitlines()[1] == "From beyond the window come 10.0 % of perplexity."


def remembered(far: dict[str, float]) -> list[Result]:
    return [Result(name, 0, 1.0, value, {}, 0.1, 1024) for name, value in far.items()]


def test_the_verdict_on_memory() -> None:
    results = remembered({"identity": 0.02, "window": 0.10, "favor": 0.91, "softmax": 1.0})
    assert demo.memory_verdict(results) == (
        "Where a key was last seen more than 64 tokens ago, exact attention is right in 100 %, favor in 91 %, a window "
        "of the same memory in 10 %: of what exact attention has over the window, favor has 90 %."
    )
    assert demo.memory_verdict(remembered({"window": 0.02, "favor": 0.02, "softmax": 0.03})) == (
        "Exact attention has not learned the task: nothing can be said of the others."
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The demonstration with everything that takes time taken out; what it would have done."""
    done: list[Any] = []

    class Training:
        def __init__(self, command: list[str]) -> None:
            done.append(command)
            folder = Path(command[command.index("--out") + 1])
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps(RESULTS[folder.name]))
            (folder / "metrics.jsonl").write_text("")

        def __enter__(self) -> "Training":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def wait(self) -> int:
            return 0

    def remember(plan: Any, names: tuple[str, ...], output: Path) -> list[Result]:
        assert output.is_dir()
        done.append((plan.task, plan.keys, plan.length, plan.steps, plan.shape.favor, names, output))
        return remembered(dict.fromkeys(names, 1.0) | {"window": 0.25})

    def generated(folder: Path, output: Path, **options: Any) -> int:
        done.append((folder, options))
        output.write_text(">made up\nMKV\n")
        return 0

    monkeypatch.setattr(demo.subprocess, "Popen", Training)
    monkeypatch.setattr(demo, "measured", remember)
    monkeypatch.setattr(demo, "_decode", lambda folder: COSTS[folder.name])
    monkeypatch.setattr(sys.modules["subquad.cli.generate"], "generate", generated)
    return done


def test_models_are_trained_compared_and_one_is_asked(
    steps: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), "--steps", "7", "--window", "1024"]) == 0
    options = {"identity": "", "window": " --option window=198", "softmax": ""}
    options["favor"] = " --option num_features=64 --option near=64"
    for (name, given), command in zip(options.items(), steps, strict=False):
        text = " ".join(command)
        assert text.split(" -m ")[1] == (
            f"subquad train protein --resume --out {tmp_path / name} --layers 2 --hidden 128 --heads 4 "
            f"--intermediate 256 --attention {name}{given} --steps 7 --window 1024 --eval-every 50 --save-every 50"
        )
    favor = {"num_features": 48, "near": 8, "sinks": 4}
    assert steps[4:] == [
        ("recall", 32, 512, 150, favor, ("identity", "window", "favor", "softmax"), tmp_path / "memory"),
        (
            tmp_path / "favor",
            {"prompt": "M", "length": 240, "num": 1, "temperature": 0.9, "top_k": 0, "top_p": 0.95}
            | {"greedy": False, "endless": False, "seed": 0},
        ),
    ]
    shown = capfd.readouterr().out
    order = [
        "4 models of proteins, windows of 1,024 residues, 7 steps each",
        "training with identity",
        "training with window",
        "training with softmax",
        "training with favor",
        "decoding",
        "held-out perplexity",
        "Perplexity below the unigram baseline",
        "a task of memory",
        "100 %",
        "favor has 100 %",
        "plot: ",
        "a protein that the favor model made up",
        ">made up\nMKV\n",
    ]
    places = [shown.index(text) for text in order]
    assert places == sorted(places)
    assert shown.endswith(">made up\nMKV\n")
    assert (tmp_path / "demo.png").exists()


def test_a_training_that_fails_ends_it(steps: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.subprocess.Popen, "wait", lambda _: 130)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert len(steps) == 1


def test_decoding_is_measured_on_held_out_proteins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.cli import common
    from subquad.data import Windows, load_proteins

    asked: list[Any] = []
    monkeypatch.setattr(common, "load_model", lambda folder: type("Loaded", (), {"model": folder}))
    monkeypatch.setattr("subquad.bench.decode_costs", lambda *args: asked.append(args) or [])
    assert demo._decode(tmp_path) == []
    model, tokens, contexts = asked[0]
    assert (model, contexts) == (tmp_path, CONTEXTS)
    held_out = load_proteins().split(0.05)[1]
    assert tokens.tolist() == Windows(held_out, 16_384, objective="causal", seed=0).tokens(0).tolist()
