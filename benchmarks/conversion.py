"""What conversion costs a language model, with controls: SmolLM2-135M, fitted to Shakespeare and asked about Milton.

    python benchmarks/conversion.py runs/conversion                  # sequences of 2,048 tokens
    python benchmarks/conversion.py runs/long --length 8192 --fit 3 --tests 1

Perplexity divided by that of the exact model; standard errors are of its logarithm, over blocks of 64 tokens. Copy: the
perplexity where the first tokens of a text come again, 512 tokens and half of the length after they were read. What is
fitted is kept in the folder: interrupted, the same command goes on, and `--rows` does a part of the work.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad import FavorAttention
from subquad.bench.bill.texts import compared, copying, losses
from subquad.bench.real_heads import Sizes, load_model
from subquad.bench.records import machine
from subquad.conversion import swap_attention
from subquad.files import write_text

WINDOW, SINKS, FEATURES = 256, 4, 64
EQUAL = 344  # a window of the memory of those features and that window


def swapped(attention: str, **options: Any) -> Callable[..., None]:
    return lambda model, *_: swap_attention(model, attention, **options)


def converted(budget: str, *kinds: str) -> Callable[..., None]:
    def convert(model: Any, fit: list[Any], options: argparse.Namespace) -> None:
        sizes = {"window": WINDOW, "sinks": SINKS, "num_features": FEATURES, "steps": options.steps}
        how = {"budget": budget, "kinds": kinds or None, "folder": options.folder / "fitted"}
        print(subquad.convert(model, fit, **sizes, **how))

    return convert


ROWS: dict[str, Callable[..., None]] = {
    "no attention": swapped("identity"),
    f"window {WINDOW} + {SINKS}": swapped("window", window=WINDOW, global_tokens=SINKS),
    f"window {EQUAL} + {SINKS}": swapped("window", window=EQUAL, global_tokens=SINKS),
    "window 512 + 4": swapped("window", window=512, global_tokens=SINKS),
    "pages": swapped("pages"),
    "constant": converted("constant"),
    "exact 10%": converted("exact 10%", "window", "features", "exact"),
    "exact 20%": converted("exact 20%", "window", "features", "exact"),
    "windows and exact 10%": converted("exact 10%", "window", "exact"),
    "pages 10%": converted("exact 10%", "window", "features", "pages"),
    "17% of cache without growth": converted("cache 17%", "window", "features"),
    "25% of cache": converted("cache 25%", "window", "features", "exact"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What conversion costs SmolLM2, with controls.")
    parser.add_argument("folder", type=Path, help="for what is fitted, and for conversion.json")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of them, comma-separated")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--fit", type=int, default=5, help="sequences to fit to; every fifth is held out")
    parser.add_argument("--tests", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of fitting a layer")
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := sorted(set(rows) - set(ROWS)):
        parser.error(f"there is no row {', '.join(unknown)}; known: {', '.join(ROWS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    output = options.folder / "conversion.json"
    sizes = Sizes(options.fit, options.tests, options.length)
    plan = {"model": "SmolLM2-135M", "sizes": sizes._asdict(), "steps": options.steps}
    before = json.loads(output.read_text()) if output.exists() else {"plan": plan, "results": []}
    if before["plan"] != plan:
        parser.error(f"{output} is of another plan: {before['plan']}; give the same, or another folder")
    records = before["results"]
    for row in rows:
        if row not in {record["row"] for record in records}:
            records.append({"row": row, **measured(ROWS[row], sizes, options)})
            write_text(output, json.dumps({"machine": machine(), "plan": plan, "results": records}, indent=1) + "\n")
    show(records)


@torch.no_grad()
def measured(change: Callable[..., None], sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    real = load_model("smollm2", sizes=sizes)
    model, texts = real.model, [batch["input_ids"] for batch in real.test]
    texts = [text[None] for batch in texts for text in batch]
    exact, exact_copy = [losses(model, text) for text in texts], copies(model, texts)
    change(model, real.fit, options)
    found = {"perplexity": torch.cat(exact).mean().exp().item(), "exact_copy": exact_copy}
    found |= compared([losses(model, text) for text in texts], exact)._asdict()
    found["copy"] = copies(model, texts)
    found["state"] = model(texts[0], use_cache=True, logits_to_keep=1).past_key_values.nbytes()
    layers = [module for module in model.modules() if isinstance(module, FavorAttention)]
    if layers:
        for layer in layers:
            layer.far = False
        found["far_off"] = compared([losses(model, text) for text in texts], exact).ratio
    return found


def copies(model: Any, texts: list[Tensor]) -> dict[str, float]:
    """Perplexity where the beginning of a text comes again, by how many tokens ago it was read."""
    half = texts[0].shape[1] // 2
    return {str(distance): copying(model, texts, distance) for distance in sorted({min(512, half), half})}


def show(records: list[dict[str, Any]]) -> None:
    print(f"{'':20} ratio          far off   copy (exact)                    MB   by place")
    for r in records:
        far = f"{r['far_off']:.4f}" if "far_off" in r else ""
        places = ", ".join(f"{place}: {ratio:.3f}" for place, ratio in r["by_place"].items())
        head = f"{r['row']:20} {r['ratio']:.4f} ±{r['error']:.4f} {far:8}"
        copy = " ".join(
            f"{distance}: {r['copy'][distance]:.2f} ({exact:.2f})" for distance, exact in r["exact_copy"].items()
        )
        print(f"{head} {copy} {r['state'] / 1e6:7.1f}   {places}")


if __name__ == "__main__":
    main()
