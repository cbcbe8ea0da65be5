"""How far outputs are from those of exact attention, head by head: over whole calls, or over sampled rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.mechanism import Mechanism, masked_softmax
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.baselines import near_rows, uniform_rows
from subquad.recording.calls import Call
from subquad.recording.samples import samples


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


class ExactOutputs:
    """Calls with the outputs of exact attention, in float32 or better: computed once, however much is compared."""

    @torch.no_grad()
    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.outputs = [call.precise().exact() for call in calls]

    @torch.no_grad()
    def errors(self, attend: Mechanism | Callable[[Call], Tensor]) -> Tensor:
        """Relative error of each head's output over all real rows, float64 `[H]`."""
        total = ErrorSum()
        for call, exact in zip(self.calls, self.outputs, strict=True):
            out = call.attend(attend) if isinstance(attend, Mechanism) else attend(call)
            total.add(out, exact, call.real)
        return total.errors


class Fidelity(NamedTuple):
    """Relative errors of the outputs against exact attention, float64 `[H]`.

    error: of the layer. uniform: of the mean of all visible values. near: of exact attention within the layer's near
    blocks and sinks alone (blocks of WINDOW where it has none); None in cross-attention, where nothing is near.
    """

    error: Tensor
    uniform: Tensor
    near: Tensor | None


@torch.no_grad()
def sampled_fidelity(mechanism: FavorAttention, calls: Sequence[Call], *, rows: int, seed: int) -> Fidelity:
    """Errors of the layer, which runs on whole sequences, and of both baselines, on sampled rows."""
    error, uniform, near = ErrorSum(), ErrorSum(), ErrorSum()
    for sample in samples(calls, rows, seed):
        call = sample.call
        real = call.real[:, sample.rows]
        exact = masked_softmax(sample.logits, sample.seen) @ sample.values
        error.add(call.attend(mechanism)[:, :, sample.rows], exact, real)
        uniform.add(uniform_rows(sample).expand_as(exact), exact, real)
        if call.q.shape[2] == call.k.shape[2]:
            near.add(near_rows(mechanism, sample), exact, real)
    return Fidelity(error.errors, uniform.errors, near.errors if near.size is not None else None)
