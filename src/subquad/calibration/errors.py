"""How far outputs are from those of exact attention, head by head."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from subquad.calibration.heads import Heads
from subquad.mechanism import Mechanism


class ErrorSum:
    """|out - exact| / |exact| of each head over all rows added so far."""

    def __init__(self) -> None:
        self.wrong: Tensor | None = None
        self.size: Tensor | None = None

    def add(self, out: Tensor, exact: Tensor, real: Tensor) -> None:
        """out, exact `[B, H, R, Dv]`, real `[B, R]`."""
        keep = real[:, None, :, None]
        wrong, size = (
            torch.where(keep, t, 0).double().square().sum((0, 2, 3)) for t in (out.double() - exact.double(), exact)
        )
        self.wrong = wrong if self.wrong is None else self.wrong + wrong
        self.size = size if self.size is None else self.size + size

    @property
    def errors(self) -> Tensor:
        """float64 `[H]`. Of a head whose exact output is zero: 0 if that is what came out, else infinity."""
        assert self.wrong is not None
        assert self.size is not None
        return torch.where(self.wrong == 0, 0.0, self.wrong / self.size).sqrt().cpu()  # NaN stays NaN


@torch.no_grad()
def head_errors(mechanism: Mechanism | Callable[[Heads], Tensor], batches: Iterable[Heads]) -> Tensor:
    """Relative error of each head's output over all real rows, float64 `[H]`."""
    total = ErrorSum()
    for heads in batches:
        out = heads.attend(mechanism) if isinstance(mechanism, Mechanism) else mechanism(heads)
        total.add(out, heads.precise().exact(), heads.real)
    return total.errors
