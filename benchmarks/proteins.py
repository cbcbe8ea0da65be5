"""The same protein model with each mechanism: perplexity and accuracy over steps, seconds per step, memory.

    python benchmarks/proteins.py DB.fasta.gz

The recorded results use the 20,000 UniProt sequences of MMseqs2's examples (Debian package mmseqs2-examples).
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from subquad.files import write_text
from subquad.training.metrics import MetricsFile, plot_losses

ATTENTIONS = {
    "softmax": [],
    "favor": ["--option", "num_features=128"],
    "linear": [],
}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the same protein model with each mechanism.")
    parser.add_argument("fasta", type=Path, help="sequences to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for proteins.json and proteins.png")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    records: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in ATTENTIONS.items():
            run = Path(folder) / name
            train(options, name, extra, run)
            curve = MetricsFile(run).records()
            records[name] = {"summary": json.loads((run / "summary.json").read_text()), "curve": curve}
            records[name]["summary"].pop("folder")
    unigram = next(iter(records.values()))["summary"]["unigram_loss"]
    curves = {name: record["curve"] for name, record in records.items()}
    plot_losses(curves, options.output / "proteins.png", unigram=unigram, unit="residue")
    about = {"fasta": options.fasta.name, "steps": options.steps, "window": options.window, **machine()}
    write_text(options.output / "proteins.json", json.dumps({**about, "runs": records}, indent=1) + "\n")
    show(records, unigram)


def train(options: argparse.Namespace, name: str, extra: list[str], run: Path) -> None:
    model = ["--layers", "4", "--hidden", "128", "--heads", "4", "--attention", name, *extra]
    schedule = ["--steps", str(options.steps), "--window", str(options.window), "--eval-every", "50"]
    command = [sys.executable, "-m", "subquad", "train", "protein", str(options.fasta), "--out", str(run)]
    subprocess.run([*command, *model, *schedule, "--save-every", str(options.steps)], check=True)


def machine() -> dict[str, str | int]:
    return {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": str(torch.__version__)}


def show(records: dict[str, dict], unigram: float) -> None:
    print(f"unigram perplexity {torch.tensor(unigram).exp():.3f}")
    for name, record in records.items():
        summary = record["summary"]
        quality = f"{summary['metrics']['eval_perplexity']:.3f}, {100 * summary['metrics']['eval_accuracy']:.2f} %"
        print(f"{name:8} {quality}  {summary['seconds_per_step']:.3f} s/step  {summary['peak_memory'] / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
