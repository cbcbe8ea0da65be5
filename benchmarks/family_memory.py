"""Does what lies beyond a window help on real proteins? Families of relatives, with controls.

    blastdbcmd -db goasp.fasta -entry all     # of the three sets in Debian's metastudent-data: Swiss-Prot of 2014
    mmseqs easy-linclust proteins.fasta families work --min-seq-id 0.5 -c 0.8
    python benchmarks/family_memory.py families_all_seqs.fasta runs/family

Each accession once; any large FASTA will do. A sequence holds members of one family, one after the other: what an
earlier one says tells most about a later one, and it lies a protein's length back, further than a window of the memory
of `favor` reaches. The same causal model is trained with each mechanism on the same families in the same order, and
evaluated on held-out families. Interrupted, the same command goes on; `--rows` does a part of the work.
"""

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_runs
import numpy as np
import torch
import torch.nn.functional as F
from memory_runs import Layer, Learner
from torch import Tensor

from subquad.models import SubquadConfig, SubquadForCausalLM

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"  # X: all others
BEGIN = len(LETTERS)  # of a member
LENGTH, HIDDEN, HEADS, LAYERS, BATCH, STEPS = 2048, 128, 2, 2, 4, 400
SHORTEST, LONGEST = 256, 680  # residues of a member: the one before is out of the window's reach, and within LENGTH
HELD_OUT = 10  # one family in so many
TESTS, AT_ONCE = 64, 8

FAVOR = {"num_features": 128, "near": 16, "reach": 4}
ROWS: dict[str, list[Layer]] = {
    "identity": [("identity", {})] * LAYERS,
    "near-only": [("favor", {**FAVOR, "far": False})] * LAYERS,
    "window": [("window", {"window": 216})] * LAYERS,  # the memory of that state, to a token
    "favor": [("favor", FAVOR)] * LAYERS,
    "hedgehog": [("favor", {**FAVOR, "estimator": "hedgehog"})] * LAYERS,
    "lsh": [("lsh", {"num_buckets": 32, "bucket_size": 64, "rounds": 2})] * LAYERS,
    "softmax": [("softmax", {})] * LAYERS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Relatives, with and without what lies beyond the window.")
    parser.add_argument("families", type=Path, help="the ..._all_seqs.fasta that mmseqs writes")
    options = memory_runs.options_of(parser, ROWS, "family_memory", STEPS)
    if not options.families.is_file():
        parser.error(f"there is no file {options.families}")
    families = read(options.families)
    if len(families[True]) < 2 or len(families[False]) < 2:
        parser.error(f"{options.families} holds too few families of {LENGTH + 1} residues")
    records = memory_runs.measure_all(options, ROWS, lambda *given: measure(families, *given))
    shape = (BATCH, HEADS, LENGTH, HIDDEN // HEADS)
    seconds = memory_runs.seconds_per_layer(ROWS, {record["row"] for record in records}, shape)
    counts = {"families": len(families[True]), "held_out_families": len(families[False])}
    about = {**counts, "length": LENGTH, "steps": options.steps, "rows": ROWS, "attention_seconds": seconds}
    memory_runs.save(options.output, "family_memory", about, records, "residue")
    memory_runs.show(records, seconds, "with_relatives", 1, "nats per residue  with relatives")


Family = list[np.ndarray]


def read(path: Path) -> dict[bool, list[Family]]:
    """Families that fill a sequence: for training (True), and held out."""
    number = np.full(256, LETTERS.index("X"), np.int64)
    number[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
    families: dict[bool, list[Family]] = {True: [], False: []}
    for name, members in clusters(path):
        fitting = [number[np.frombuffer(m, np.uint8)] for m in members if SHORTEST <= len(m) <= LONGEST]
        if sum(1 + len(member) for member in fitting) > LENGTH:
            families[zlib.crc32(name) % HELD_OUT > 0].append(fitting)
    return families


def clusters(path: Path) -> Iterator[tuple[bytes, list[bytes]]]:
    """Name and members. mmseqs writes a family's name, without a sequence, before its members."""
    name, members, header = b"", [], b""
    with path.open("rb") as lines:
        for line in lines:
            if not line.startswith(b">"):
                members.append(line.strip())
                header = b""
                continue
            if header:  # two in a row
                if members:
                    yield name, members
                name, members = header, []
            header = line
    if members:
        yield name, members


def sequence(family: Family, random: np.random.Generator) -> tuple[np.ndarray, int]:
    """`[LENGTH + 1]` tokens, and where the second member begins."""
    order = [family[i] for i in random.permutation(len(family))]
    line = np.concatenate([part for member in order for part in ([BEGIN], member)])
    return line[: LENGTH + 1], 1 + len(order[0])


class Reader(Learner):
    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = SubquadConfig(
            vocab_size=BEGIN + 1,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * HIDDEN,
            initializer_range=0.05,
            qk_norm=True,
            attention=[mechanism for mechanism, _ in ROWS[name]],
            attention_options=[given for _, given in ROWS[name]],
        )
        self.model = SubquadForCausalLM(config)
        self.model.redraw(seed)

    def losses(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def measure(
    families: dict[bool, list[Family]], name: str, seed: int, steps: int, told: memory_runs.Told
) -> dict[str, Any]:
    """Trains one model; losses in nats per residue, of all and of those that had a whole relative before them."""
    reader, tests = Reader(name, seed), held_out(families[False])
    some = tests[0][: TESTS // 4], tests[1][: TESTS // 4]
    curve, seconds = memory_runs.train(
        reader, batches(families[True], seed, steps), steps, lambda: evaluated(reader, *some)[0], told
    )
    every, related = evaluated(reader, *tests)
    curve[-1]["eval_loss"] = every
    state = memory_runs.state_bytes(reader.model.model.blocks, (1, HEADS, LENGTH, HIDDEN // HEADS))
    facts = {"seconds_per_step": seconds, "state": state, "curve": curve}
    return {"loss": every, "with_relatives": related, **facts}


def batches(families: list[Family], seed: int, steps: int) -> Iterator[Tensor]:
    """The same ones for every row."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = (families[random.integers(len(families))] for _ in range(BATCH))
        yield torch.from_numpy(np.stack([sequence(family, random)[0] for family in chosen]))


def held_out(families: list[Family]) -> tuple[Tensor, Tensor]:
    """ids `[TESTS, LENGTH + 1]`, and where their second members begin `[TESTS]`: the same for every row and seed."""
    random = np.random.default_rng(0)
    drawn = [sequence(families[i % len(families)], random) for i in range(TESTS)]
    return torch.from_numpy(np.stack([ids for ids, _ in drawn])), torch.tensor([second for _, second in drawn])


@torch.no_grad()
def evaluated(reader: Reader, ids: Tensor, second: Tensor) -> tuple[float, float]:
    reader.eval()
    losses = torch.cat([reader.losses(some) for some in ids.split(AT_ONCE)])
    reader.train()
    related = torch.arange(1, LENGTH + 1) > second[:, None]
    return losses.mean().item(), losses[related].mean().item()


if __name__ == "__main__":
    main()
