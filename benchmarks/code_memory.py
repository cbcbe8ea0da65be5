"""Does what lies beyond a window help on real text? Python's own library, with controls.

    python benchmarks/code_memory.py runs/code

A tokenizer of 4,096 pieces is fitted to a third of the files; then the same causal model is trained with each
mechanism, three seeds each, and evaluated on the same held-out files. Interrupted, the same command goes on.
"""

import argparse
import json
import math
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from turns import attention_seconds

from subquad.bench.recall.measure import Mean
from subquad.bench.records import machine
from subquad.files import write_text
from subquad.training.metrics import MetricsFile, plot_losses

LENGTH, BATCH, HIDDEN, HEADS, STEPS = 2048, 4, 128, 2, 400
SIZES = range(8192, 400_000)  # bytes of a file
LEFT_OUT = {"idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
RESULTS = Path(__file__).parent / "results"

FAVOR = {"num_features": 128, "near": 16, "reach": 4}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("identity", {}),
    "window": ("window", {"window": 216}),  # the memory of that state, to a token
    "favor": ("favor", FAVOR),
    "hedgehog": ("favor", {**FAVOR, "estimator": "hedgehog"}),
    "softmax": ("softmax", {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Code, with and without what lies beyond the window.")
    parser.add_argument("folder", type=Path, help="for the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for code_memory.json and code_memory.png")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    runs = {(name, seed): options.folder / f"{name}-{seed}" for seed in range(options.seeds) for name in ROWS}
    prepare(options.folder)
    for (name, seed), run in runs.items():
        train(options, name, seed, run)
    records = [
        {"row": name, "seed": seed, **json.loads((run / "summary.json").read_text())["metrics"]}
        for (name, seed), run in runs.items()
    ]
    curves = {name: MetricsFile(runs[name, 0]).records() for name in ROWS}
    unigram = json.loads((runs["softmax", 0] / "summary.json").read_text())["unigram_loss"]
    plot_losses(curves, options.output / "code_memory.png", unigram=unigram, unit="token")
    seconds = attention_seconds(ROWS, (BATCH, HEADS, LENGTH, HIDDEN // HEADS))
    about = {"machine": machine(), "length": LENGTH, "steps": STEPS, "rows": ROWS, "attention_seconds": seconds}
    write_text(options.output / "code_memory.json", json.dumps({**about, "results": records}, indent=1) + "\n")
    show(records, seconds)


def prepare(folder: Path) -> None:
    """The files, and a tokenizer for them."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    for name, text in modules():
        (folder / "files" / name).write_text(text, encoding="utf-8")
    if not (folder / "tokenizer").exists():
        fitted = ByteLevelBPETokenizer()
        some = [str(path) for path in sorted((folder / "files").iterdir())][::3]
        fitted.train(some, vocab_size=4096, min_frequency=2, special_tokens=["<pad>", "<s>"])
        names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<s>"}
        PreTrainedTokenizerFast(tokenizer_object=fitted._tokenizer, **names).save_pretrained(folder / "tokenizer")


def modules() -> Iterator[tuple[str, str]]:
    """Of the standard library, its tests included: name and text."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if not LEFT_OUT & set(inside.parts) and path.stat().st_size in SIZES:
            try:
                yield "_".join(inside.parts), path.read_bytes().decode()
            except UnicodeDecodeError:  # tests of encodings
                continue


def train(options: argparse.Namespace, row: str, seed: int, run: Path) -> None:
    attention, given = ROWS[row]
    settings: dict[str, Any] = {"tokenizer": options.folder / "tokenizer", "out": run, "threads": options.threads}
    settings |= {"attention": attention, "seed": seed, "steps": STEPS, "window": LENGTH, "batch-size": BATCH}
    settings |= {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "intermediate": 2 * HIDDEN, "eval-samples": 64}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += [word for name, value in given.items() for word in ("--option", f"{name}={value}")]
    command = [sys.executable, "-m", "subquad", "train", "text", str(options.folder / "files"), "--resume", "--qk-norm"]
    subprocess.run([*command, *words], check=True)


def show(records: list[dict[str, Any]], seconds: dict[str, float]) -> None:
    loss = {name: Mean.of([r["eval_loss"] for r in records if r["row"] == name]) for name in ROWS}
    window, exact = loss["window"].value, loss["softmax"].value
    print("row       loss            perplexity  below the window  of softmax's gain  attention, ms")
    for name, mean in loss.items():
        below, share = 100 * (1 - math.exp(mean.value - window)), 100 * (window - mean.value) / (window - exact)
        cells = f"{mean.value:.4f} ±{mean.error:.4f} {math.exp(mean.value):11.3f} {below:15.1f} % {share:17.0f} %"
        print(f"{name:9} {cells} {1000 * seconds[name]:14.1f}")


if __name__ == "__main__":
    main()
