"""What a conversion decided for every key head, and how it is told."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad import files
from subquad.checks import diagnostics as checks
from subquad.conversion.candidates import Candidate, Priced
from subquad.conversion.measured import Measured


@dataclass(frozen=True)
class LayerPolicy:
    """One layer, by key head. heads: what each became. nats: what that costs the model, per token. nbytes: its state at
    the length of the batches; all_nbytes: all keys and values of a head at that length."""

    name: str
    heads: tuple[str, ...]
    nats: tuple[float, ...]
    nbytes: tuple[float, ...]
    all_nbytes: float


@dataclass(frozen=True)
class Conversion:
    """held_out: errors were measured on batches that no features were fitted to. measured: of the whole model."""

    budget: str
    held_out: bool
    measured: Measured
    layers: tuple[LayerPolicy, ...]

    @property
    def nats(self) -> float:
        """How much higher the loss is expected to be, per token: errors of heads add up where they are small."""
        return sum(sum(layer.nats) for layer in self.layers)

    @property
    def nbytes(self) -> float:
        """Of all states of one sequence as long as the batches."""
        return sum(sum(layer.nbytes) for layer in self.layers)

    @property
    def all_nbytes(self) -> float:
        """Of the keys and values that exact attention keeps."""
        return sum(len(layer.heads) * layer.all_nbytes for layer in self.layers)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """As JSON."""
        with checks.writable(Path(path)):
            files.write_text(path, self.as_json())

    def __str__(self) -> str:
        width = max(5, *(len(layer.name) for layer in self.layers))
        where = "held-out" if self.held_out else "the same"
        lines = [
            f"budget: {self.budget}; on {where} batches: loss {self.measured.nats:+.4f} nats per token (perplexity "
            f"times {math.exp(self.measured.nats):.3f}){self._copying()}; prices of heads add up to {self.nats:.4f}",
            f"{'layer':{width}}  {'nats':>8}  key heads",
        ]
        lines += [f"{layer.name:{width}}  {sum(layer.nats):8.5f}  {', '.join(layer.heads)}" for layer in self.layers]
        if self.all_nbytes:
            kept, share = f"{self.nbytes / 1e6:.1f} MB", 100 * self.nbytes / self.all_nbytes
            lines.append(f"states: {kept}, {share:.0f} % of {self.all_nbytes / 1e6:.1f} MB of keys and values")
        return "\n".join(lines)

    def _copying(self) -> str:
        if self.measured.copying is None:
            return ""
        return f", {self.measured.copying:+.3f} where a text comes again"


def layer_policy(name: str, found: Sequence[Candidate], priced: Priced, chosen: Tensor) -> LayerPolicy:
    """chosen int64 `[K]`: candidates of the key heads."""
    price = priced.table(found)
    nats, nbytes = (tuple(x.gather(1, chosen[:, None])[:, 0].tolist()) for x in (price.nats, price.nbytes))
    return LayerPolicy(name, tuple(str(found[i]) for i in chosen.tolist()), nats, nbytes, priced.all_nbytes)


def layer_mechanisms(found: Sequence[Candidate], chosen: Tensor) -> tuple[str, dict[str, Any]]:
    """Name and options of the mechanism of a layer whose key heads became `chosen`, as `swap_attention` takes them."""
    heads: dict[int, list[int]] = {}
    for head, candidate in enumerate(chosen.tolist()):
        heads.setdefault(candidate, []).append(head)
    if len(heads) == 1:
        (only,) = heads
        return found[only].attention, dict(found[only].options)
    parts = [{"attention": found[i].attention, "heads": own, **found[i].options} for i, own in sorted(heads.items())]
    return "mixed", {"parts": parts}
