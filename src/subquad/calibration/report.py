"""What a calibration did, layer by layer and head by head."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from subquad import files
from subquad.checks import diagnostics as checks


@dataclass(frozen=True)
class LayerReport:
    """Relative errors of each head's output against exact attention, with the features before and after."""

    name: str
    num_features: int
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def mean_before(self) -> float:
        return sum(self.before) / len(self.before)

    @property
    def mean_after(self) -> float:
        return sum(self.after) / len(self.after)


@dataclass(frozen=True)
class CalibrationReport:
    """`held_out`: errors were measured on batches that took no part in the fit."""

    estimator: str
    held_out: bool
    layers: tuple[LayerReport, ...]

    @property
    def mean_before(self) -> float:
        return sum(layer.mean_before for layer in self.layers) / len(self.layers)

    @property
    def mean_after(self) -> float:
        return sum(layer.mean_after for layer in self.layers) / len(self.layers)

    def save(self, path: str | Path) -> None:
        """As JSON."""
        with checks.writable(Path(path)):
            files.write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        where = "held-out" if self.held_out else "the same"
        width = max(5, *(len(layer.name) for layer in self.layers))
        lines = [
            f"estimator={self.estimator!r}; relative error of the outputs on {where} batches, mean and worst head",
            f"{'layer':{width}}  features  before (worst)   after (worst)",
        ]
        for layer in self.layers:
            before, after = (f"{mean:7.3f} ({worst:6.3f})" for mean, worst in _pairs(layer))
            lines.append(f"{layer.name:{width}}  {layer.num_features:8}  {before}  {after}")
        lines.append(f"{'all':{width}}            {self.mean_before:6.3f}           {self.mean_after:6.3f}")
        return "\n".join(lines)


def _pairs(layer: LayerReport) -> list[tuple[float, float]]:
    return [(layer.mean_before, max(layer.before)), (layer.mean_after, max(layer.after))]
