"""What conversion costs encoders: AntiBERTy (features alone) and MiniLM (features and a window), with controls.

    python benchmarks/encoders.py runs/encoders

Fitted to some sequences, asked about others: masked tokens guessed, cosines of mean hidden states with those of the
exact model, nearest neighbours kept among all sequences asked about. What is fitted is kept in the folder.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.bench.bill import Biller, Vocabulary, plan_of
from subquad.bench.real_heads import Sizes, antiberty_vocabulary, load_model
from subquad.bench.records import machine
from subquad.files import write_text

FEATURES = 64
MODELS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "antiberty": (Sizes(64, 256, 160), {"window": 0, "steps": 300}),
    "minilm": (Sizes(24, 48, 512), {"window": 32, "steps": 200}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What conversion costs encoders, with controls.")
    parser.add_argument("folder", type=Path, help="for what is fitted, and for encoders.json")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, comma-separated")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"there is no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    output = options.folder / "encoders.json"
    found = json.loads(output.read_text())["results"] if output.exists() else {}
    for name in names:
        if name not in found:
            found[name] = measured(name, options.folder)
            write_text(output, json.dumps({"machine": machine(), "results": found}, indent=1) + "\n")
        show(name, found[name])


def measured(name: str, folder: Path) -> dict[str, Any]:
    sizes, how = MODELS[name]
    real = load_model(name, sizes=sizes)
    vocabulary = Vocabulary(None)
    if name == "antiberty":
        tokens = antiberty_vocabulary()
        vocabulary = Vocabulary(tokens["[MASK]"], tuple(i for token, i in tokens.items() if token.startswith("[")))
    report = subquad.convert(real.model, real.fit, num_features=FEATURES, folder=folder / name, **how)
    print(report)
    plan = plan_of(real.model, [batch["input_ids"] for batch in real.test])
    batches = [with_mask(batch) for batch in real.test]
    found = Biller(real.model, plan, None).sequences(batches, vocabulary, progress=True)
    expected = {"expected": report.nats, "measured": report.measured.nats}
    return {"sizes": sizes._asdict(), "options": how | {"num_features": FEATURES}, **expected, "rows": found.rows}


def with_mask(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['sizes']}, {found['options']}")
    for row, r in found["rows"].items():
        accuracy = "" if r["accuracy"] is None else f"masked {100 * r['accuracy']:.2f} %  "
        kept = f"neighbours kept {100 * r['neighbours_kept']:.0f} %"
        print(f"  {row:18} {accuracy}cosine {r['cosine']:.4f} (smallest {r['smallest_cosine']:.3f})  {kept}")


if __name__ == "__main__":
    main()
