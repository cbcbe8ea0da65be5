"""What the C++ engine may be given to convolve: declared here, and checked by the gate like all else.

Letters: B batch, T tokens, E channels, W taps; of a step, X and Y channels of its parts, E = X + Y, and P = W - 1.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.kernels.cpu.gate import COUNT, MOST_THREADS, OP, check_factor, declared_pointers, new_like
from subquad.kernels.cpu.library import Convolution, ConvolutionStep

CONVOLUTION = {
    **{"x": "float B T E", "taps": "float W E", "grad": "float B T E"},
    **{"out": "made B T E", "dtaps": "made parts W E"},
}
STEP = {
    **{"weight": "float E one W", "recent": "float B P E", "x": "float B one X", "y": "float B one Y"},
    **{"out_x": "made B one X", "out_y": "made B one Y", "new_recent": "made B P E"},
}


class ConvolutionPlan:
    """What the pointers of a convolution over tokens must be; its letters are those of `kernels/convolution.py`."""

    part = 512  # tokens of a task

    def __init__(self, batch: int, length: int, channels: int, width: int, causal: bool) -> None:
        self.numbers = {"width": width, "causal": int(causal), "batch": batch, "length": length, "channels": channels}
        for name, number in self.numbers.items():
            checks.number(OP, name, number, int(name != "causal"), 2**40 if name == "length" else COUNT)
        parts = batch * -(-length // self.part)
        sizes = {"B": batch, "T": length, "E": channels, "W": width, "parts": parts}
        self._pointers = declared_pointers(CONVOLUTION, sizes, torch.float32)

    def new(self, name: str) -> Tensor:
        return self._pointers[name].new()

    def problem(self, threads: int, **tensors: Tensor | None) -> Convolution:
        """All of `x` and `taps`, and `out`, or `grad` and what of `out` and `dtaps` is wanted."""
        checks.number(OP, "threads", threads, 1, MOST_THREADS)
        given = Convolution(threads=threads, part=self.part, **self.numbers)
        for name in ("x", "taps", "grad" if tensors.get("dtaps") is not None else "x"):
            if tensors.get(name) is None:
                raise checks.missing(OP, name)
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(given, name, self._pointers[name].to(tensor))
        given.tensors = tensors  # kept alive
        return given


@functools.lru_cache(maxsize=64)
def convolution_plan(batch: int, length: int, channels: int, width: int, causal: bool) -> ConvolutionPlan:
    return ConvolutionPlan(batch, length, channels, width, causal)


class ConvolutionStepPlan:
    """The same of one token, whose channels come in one part or two. rate: taps per unit of weight."""

    def __init__(self, batch: int, parts: tuple[int, ...], width: int, rate: float) -> None:
        first, second = (*parts, 0)[:2]
        for name, number in (("batch", batch), ("first", first), ("width", width)):
            checks.number(OP, name, number, 1, COUNT)
        checks.number(OP, "second", second, len(parts) - 1, COUNT)
        check_factor("rate", rate)
        sizes = {"B": batch, "X": first, "Y": second, "E": first + second, "W": width, "P": width - 1, "one": 1}
        pointers = declared_pointers(STEP, sizes, torch.float32)
        self._read = tuple(pointers[name] for name in ("weight", "recent", "x", "y")[: 2 + len(parts)])
        self._made = ("new_recent", "out_x", "out_y")[: 1 + len(parts)]
        self._template = ConvolutionStep(width, rate, batch, first, second)

    def problem(self, weight: Tensor, recent: Tensor, parts: Sequence[Tensor]) -> tuple[ConvolutionStep, list[Tensor]]:
        """Also what C++ fills: the next `recent`, and an output for each part."""
        given, read = ConvolutionStep.from_buffer_copy(self._template), (weight, recent, *parts)
        for pointer, tensor in zip(self._read, read, strict=True):
            setattr(given, pointer.name, pointer.to(tensor))
        given.tensors = read  # kept alive
        return given, new_like(given, self._made, (recent, *parts))


@functools.lru_cache(maxsize=64)
def convolution_step_plan(batch: int, parts: tuple[int, ...], width: int, rate: float) -> ConvolutionStepPlan:
    return ConvolutionStepPlan(batch, parts, width, rate)
