"""Does it cost more to have better features? Speed of every estimator of `favor`, and the time calibration takes.

    python benchmarks/estimators.py [--calibrate minilm smollm2]

Estimators take turns in one process; ratios are to "positive" (FAVOR+). Calibration downloads its models once.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import subquad
from subquad.bench import time_side_by_side
from subquad.bench.records import machine
from subquad.files import write_text
from subquad.mechanisms.favor import ESTIMATORS

RESULTS = Path(__file__).parent / "results"
SHAPE = (1, 8, 8192, 64)
NEAR = {"paper": {"near": 0, "sinks": 0}, "defaults": {}}


def layers(options: dict[str, Any]) -> dict[str, subquad.FavorAttention]:
    """One of each kind, with features of their own in each head."""
    made = {}
    for estimator in ESTIMATORS:
        if estimator == "trigonometric":
            continue  # goes through another engine
        made[estimator] = subquad.FavorAttention(64, estimator=estimator, num_heads=8, **options)
    made["calibrated, T"] = subquad.FavorAttention(64, estimator="calibrated", transform=True, num_heads=8, **options)
    return made


def speeds(repeats: int) -> dict[str, Any]:
    q, k, v = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    found = {}
    for title, options in NEAR.items():
        made = layers(options)

        def forward(layer: subquad.FavorAttention) -> None:
            with torch.no_grad():
                layer(q, k, v, causal=True)

        def both(layer: subquad.FavorAttention) -> None:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            layer(*leaves, causal=True).sum().backward()

        for mode, run in (("forward", forward), ("forward+backward", both)):
            calls = {name: (lambda layer=layer, run=run: run(layer)) for name, layer in made.items()}
            times = {name: timing.best for name, timing in time_side_by_side(calls, repeats).items()}
            found[f"{title}, {mode}"] = {
                name: {"ms": 1e3 * x, "ratio": x / times["positive"]} for name, x in times.items()
            }
            print(f"{title}, causal, {mode}, {SHAPE[2]:,} tokens")
            for name, x in times.items():
                print(f"  {name:14} {1e3 * x:8.1f} ms  {x / times['positive']:.2f}")
    return found


def calibration(name: str) -> dict[str, Any]:
    """All layers of a pretrained model, in the place of its attention."""
    from subquad.bench.real_heads import load_model
    from subquad.conversion import swap_attention

    real = load_model(name)
    model = swap_attention(real.model, "favor", num_features=256, near=real.near)
    tokens = sum(batch["input_ids"].numel() for batch in real.fit)
    began = time.perf_counter()
    report = subquad.calibrate(model, real.fit, progress=False)
    seconds = time.perf_counter() - began
    print(f"calibrate {name}: {len(report.layers)} layers, {tokens:,} tokens, {seconds:.0f} s")
    print(f"  mean error {report.mean_before:.3f} before, {report.mean_after:.3f} after")
    return {
        "layers": len(report.layers),
        "tokens": tokens,
        "seconds": seconds,
        "before": report.mean_before,
        "after": report.mean_after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calibrate", nargs="*", choices=("antiberty", "minilm", "smollm2"), default=())
    parser.add_argument("--output", type=Path, default=RESULTS / "estimators.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", subquad.errors.UncalibratedWarning)
    report = {"machine": machine(), "shape": SHAPE, "speed": speeds(options.repeats)}
    report["calibration"] = {name: calibration(name) for name in options.calibrate}
    write_text(options.output, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
