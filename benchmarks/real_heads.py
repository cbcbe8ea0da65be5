"""FAVOR features on the heads of three pretrained models, and a masked language model that runs on nothing else.

    python benchmarks/real_heads.py [antiberty minilm smollm2 masked]

Every layer and head, 256 features, held-out sequences: published FAVOR+ against calibrated features, without and with
near blocks and four sinks, and learned maps of 128 features. "masked": the accuracy of AntiBERTy with all of its
attention replaced, 64 features, no near blocks. Packages are downloaded once (about 280 MB).
"""

import argparse
import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.bench.fidelity import Plan, Record, measure
from subquad.bench.inputs import load_input
from subquad.bench.real_heads import SOURCES, Sizes, antiberty_vocabulary, load_model
from subquad.bench.records import machine
from subquad.conversion import swap_attention
from subquad.files import write_text

RESULTS = Path(__file__).parent / "results"
DRAWN = ("positive", "calibrated", "balanced")
FAVOR, LEARNED = 256, 128
SIZES = {"antiberty": Sizes(96, 32, 160), "minilm": Sizes(24, 8, 512), "smollm2": Sizes(12, 2, 1024)}


def heads(name: str, draws: int, steps: int) -> dict[str, Any]:
    """Errors on all heads of a model."""
    began = time.time()
    given = load_input(name, sizes=SIZES[name])
    print(f"{given.title} ({time.time() - began:.0f} s)", flush=True)
    records = measure(given, Plan(DRAWN, ("orthogonal",), (FAVOR,), draws))
    show(records)
    trained = time.time()
    records += measure(given, Plan(("hedgehog",), ("orthogonal",), (LEARNED,), 1, (True,), steps))[-1:]
    ratios = ratios_of(records)
    print(json.dumps(ratios, indent=1), f"learned in {time.time() - trained:.0f} s", flush=True)
    options = {"draws": draws, "steps": steps, "near": given.near, "sinks": 4}
    seconds = {"learning": round(time.time() - trained), "all": round(time.time() - began)}
    rows = [asdict(record) for record in records]
    return {"machine": machine(), "title": given.title, "options": options, "seconds": seconds,
            "ratios": ratios, "records": rows}  # fmt: skip


def show(records: list[Record]) -> None:
    for r in records:
        error = f"{r.mean:.4f} ±{r.se_draws:.4f} (draws) ±{r.se_heads:.4f} (heads)"
        print(f"  near={r.near:2} sinks={r.sinks} {r.estimator:11} {r.num_features:3} features: {error}", flush=True)


def ratios_of(records: list[Record]) -> dict[str, float]:
    """What was promised, and what is below 1 if it is kept: each divided by FAVOR+ with as much exact attention."""
    by = {(bool(r.near), r.estimator): r.mean for r in records}
    ratios = {}
    for near, where in ((False, "alone"), (True, "near blocks and sinks")):
        for estimator in ("calibrated", "balanced"):
            ratios[f"{estimator} / FAVOR+, {where}"] = by[near, estimator] / by[near, "positive"]
    ratios["learned / FAVOR+, near blocks and sinks"] = by[True, "hedgehog"] / by[True, "positive"]
    ratios["learned / near blocks and sinks only"] = by[True, "hedgehog"] / by[True, "window"]
    return {name: round(ratio, 4) for name, ratio in ratios.items()}


# A whole model --------------------------------------------------------------------------------------------------------


def masked(steps: int) -> dict[str, Any]:
    """Masked accuracy of AntiBERTy with one attention after the other, on chains that no calibration saw."""
    loaded = load_model("antiberty", sizes=Sizes(96, 64, 160))
    ids = antiberty_vocabulary()
    cases = [hide(batch, ids["[MASK]"], ids["[PAD]"], seed) for seed, batch in enumerate(loaded.test * 2)]
    options: dict[str, Any] = {"num_features": 64, "near": 0, "sinks": 0}
    results = {"exact": score(loaded.model, cases)}
    print("exact", results["exact"], flush=True)
    fits: tuple[tuple[str, dict[str, Any] | None], ...] = (
        ("FAVOR+", None),
        ("calibrated", {"estimator": "calibrated", "transform": False}),
        ("balanced", {"estimator": "calibrated", "transform": True}),
        ("learned", {"estimator": "hedgehog", "steps": steps}),
    )
    for name, fit in fits:
        model, began = swap_attention(copy.deepcopy(loaded.model), "favor", **options), time.time()
        if fit is not None:
            subquad.calibrate(model, loaded.fit, **fit)
        results[name] = {**score(model, cases), "seconds": round(time.time() - began, 1)}
        results[name] |= difference(results["exact"], results[name])
        print(name, {key: x for key, x in results[name].items() if key != "right"}, flush=True)
    for result in results.values():
        del result["right"]
    about = {"options": {**options, "steps": steps}, "masks": sum(int(hidden.sum()) for _, hidden, _ in cases)}
    return {"machine": machine(), **about, "results": results}


def hide(batch: dict[str, Tensor], mask: int, pad: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """15 % of the residues become masks: the batch, where they are, and what they were."""
    ids = batch["input_ids"]
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    chosen &= (ids != pad) & (ids > mask)  # special tokens come first in its vocabulary
    return {**batch, "input_ids": ids.masked_fill(chosen, mask)}, chosen, ids


@torch.no_grad()
def score(model: Any, cases: list[tuple[dict[str, Tensor], Tensor, Tensor]]) -> dict[str, Any]:
    right, loss = [], 0.0
    for batch, hidden, ids in cases:
        logits = model(**batch).logits[hidden]
        right.append(logits.argmax(-1) == ids[hidden])
        loss += float(torch.nn.functional.cross_entropy(logits, ids[hidden], reduction="sum"))
    every = torch.cat(right)
    return {"accuracy": float(every.double().mean()), "perplexity": float(torch.tensor(loss / len(every)).exp()),
            "right": every}  # fmt: skip


def difference(exact: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Paired, so that its standard error is that of the residues on which the two differ."""
    change = other["right"].double() - exact["right"].double()
    return {"points": 100 * float(change.mean()), "points_se": 100 * float(change.std()) / len(change) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description="FAVOR features on pretrained models.")
    known = (*SOURCES, "masked")
    parser.add_argument("what", nargs="*", default=known, metavar="what", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of training learned maps (masked: twice as many)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for fidelity_<what>.json")
    options = parser.parse_args()
    for what in options.what:
        if what not in known:
            parser.error(f"{what!r} is none of {', '.join(known)}")
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    for what in options.what:
        report = masked(2 * options.steps) if what == "masked" else heads(what, options.draws, options.steps)
        write_text(options.output / f"fidelity_{what}.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
