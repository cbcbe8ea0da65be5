"""Classify long sequences: ListOps (Nangia and Bowman 2018), expressions such as [MAX 2 9 [MIN 4 7 ] 0 ].

python examples/listops.py [--steps 300] [--length 256] [--attention favor]
"""

import argparse
import random
from typing import Any

import torch
from rich.progress import track

from subquad.models import SubquadConfig, SubquadForSequenceClassification
from subquad.training.muon import MuonAdamW

OPERATIONS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: sorted(values)[len(values) // 2],
    "SM": lambda values: sum(values) % 10,
}
TOKENS = {token: i + 1 for i, token in enumerate([*map(str, range(10)), *(f"[{name}" for name in OPERATIONS), "]"])}


def expression(chance: random.Random, budget: int, depth: int = 0) -> tuple[list[str], int]:
    """Tokens of a random tree of at most `budget` of them, and its value."""
    if budget < 8 or depth == 6 or (depth and chance.random() < 0.25):
        digit = chance.randrange(10)
        return [str(digit)], digit
    name, values = chance.choice(list(OPERATIONS)), []
    tokens = [f"[{name}"]
    arguments = chance.randint(2, 8)
    for _ in range(arguments):
        inner, value = expression(chance, (budget - 2) // arguments, depth + 1)
        tokens += inner
        values.append(value)
    return [*tokens, "]"], OPERATIONS[name](values)


def batch(chance: random.Random, size: int, length: int) -> dict[str, torch.Tensor]:
    made = [expression(chance, length) for _ in range(size)]
    rows = [torch.tensor([TOKENS[token] for token in tokens]) for tokens, _ in made]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([value for _, value in made])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of ListOps expressions.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--attention", default="favor")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
    config = SubquadConfig(vocab_size=len(TOKENS) + 1, attention=arguments.attention, **sizes)
    model, chance = SubquadForSequenceClassification(config), random.Random(0)
    optimizer = MuonAdamW(model, 5e-3)
    for _ in track(range(arguments.steps), description="training"):
        loss = model(**batch(chance, 16, arguments.length)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    test = batch(random.Random(1), 200, arguments.length)
    with torch.no_grad():
        guesses = model.eval()(**test).logits.argmax(-1)
    common = test["labels"].bincount().max() / len(guesses)
    right = (guesses == test["labels"]).float().mean()
    print(f"accuracy {100 * right:.1f} %; always the commonest answer: {100 * common:.1f} %")


if __name__ == "__main__":
    main()
