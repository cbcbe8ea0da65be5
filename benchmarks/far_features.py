"""Which features, and how many, make the far field remember? Associative recall, trained from scratch.

    python benchmarks/far_features.py --output far_features.json

Two questions. Choices: 64 keys in 512 tokens with 64 features, a state that is too small, so that one choice can do
better than another; each line changes one thing. Load: keys against features, from a state that is much too small to
one that is large enough. Interrupted, the same command goes on.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from subquad.bench.recall.measure import Mean, Plan, measure
from subquad.bench.recall.rows import ROWS, Row, Shape
from subquad.bench.records import machine
from subquad.files import write_text

RESULTS = Path(__file__).parent / "results"
PLAN = Plan(keys=64, length=512, steps=200, tests=64, shape=Shape(features=64))
KEYS, FEATURES = (32, 64, 128), (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Line:
    part: str
    name: str
    row: Row
    plan: Plan


def favor(**given: Any) -> Row:
    return Row("favor", "favor", lambda shape: {**shape.favor, **given})


def shaped(**given: Any) -> Plan:
    return replace(PLAN, shape=replace(PLAN.shape, **given))


def lines() -> Iterator[Line]:
    yield Line("choice", "favor as it is", favor(), PLAN)
    yield Line("choice", "a window of its memory", ROWS["window"], PLAN)
    yield Line("choice", "exact attention", ROWS["softmax"], PLAN)
    for every in (1, 10, 50):
        yield Line("choice", f"redrawn every {every} steps", favor(), replace(PLAN, redraw_every=every))
    yield Line("choice", "rows drawn independently", favor(coupling="iid"), PLAN)
    yield Line("choice", "hyperbolic", favor(estimator="hyperbolic"), PLAN)
    yield Line("choice", "hedgehog, learned", favor(estimator="hedgehog"), PLAN)
    yield Line("choice", "exponential, learned", favor(estimator="exponential"), PLAN)
    yield Line("choice", "relu kernel", ROWS["linear-relu"], PLAN)
    yield Line("choice", "no near blocks", ROWS["favor-paper"], PLAN)
    yield Line("choice", "near=4", favor(), shaped(near=4))
    yield Line("choice", "near=32", favor(), shaped(near=32))
    yield Line("choice", "one head", favor(), shaped(heads=1))
    yield Line("choice", "four heads", favor(), shaped(heads=4))
    yield Line("choice", "qk_norm", favor(), shaped(qk_norm=True))
    yield Line("choice", "hedgehog, qk_norm", favor(estimator="hedgehog"), shaped(qk_norm=True))
    yield Line("choice", "logits half as large", favor(scale=0.0625), PLAN)
    yield Line("choice", "logits twice as large", favor(scale=0.25), PLAN)
    for keys in KEYS:
        for features in FEATURES:
            plan = replace(shaped(features=features), keys=keys, length=8 * keys)
            yield Line("load", f"{keys} keys, {features} features", favor(), plan)


def main() -> None:
    parser = argparse.ArgumentParser(description="Features for training from scratch, and the load they bear.")
    parser.add_argument("--seeds", type=int, default=3, help="of the choices; the load has one")
    parser.add_argument("--steps", type=int, default=PLAN.steps)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS / "far_features.json")
    options = parser.parse_args()
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    torch.set_num_threads(options.threads)
    records = json.loads(options.output.read_text())["results"] if options.output.exists() else []
    done = {(r["part"], r["name"], r["seed"], r["steps"]) for r in records}
    todo = [
        (line, seed)
        for seed in range(options.seeds)
        for line in lines()
        if (seed == 0 or line.part == "choice") and (line.part, line.name, seed, options.steps) not in done
    ]
    with Progress() as progress:
        bar = progress.add_task("training", total=len(todo) * options.steps)
        for line, seed in todo:
            plan = replace(line.plan, steps=options.steps)
            (result,) = measure(plan, [(line.row, seed)], lambda count: progress.advance(bar, count))
            size = {"keys": plan.keys, "features": plan.shape.features, "steps": plan.steps}
            records.append({"part": line.part, "name": line.name, **size, **asdict(result)})
            report = {"machine": machine(), "plan": asdict(PLAN), "results": records}
            write_text(options.output, json.dumps(report, indent=1) + "\n")
    show(records)


def show(records: list[dict[str, Any]]) -> None:
    print(f"{'':28} far accuracy    KiB   ms per step")
    for line in lines():
        mine = [r for r in records if (r["part"], r["name"]) == (line.part, line.name)]
        if mine:
            far = Mean.of([r["far"] for r in mine])
            cost = f"{mine[0]['state'] / 1024:6.0f} {1000 * min(r['seconds_per_step'] for r in mine):8.0f}"
            print(f"{line.name:28} {far.value:.3f} ±{far.error:.3f} {cost}")


if __name__ == "__main__":
    main()
