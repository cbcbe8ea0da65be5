"""What the C++ engine may be given to choose pages: declared here, and checked by the gate like all else.

Letters as in `kernels/sparse/choice.py`, and N lines, one for each sequence and key head; R rows of candidates, 1 or B.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.kernels.cpu.gate import COUNT, MOST_THREADS, OP, SIZE, declared_pointers
from subquad.kernels.cpu.library import Choice

FIELDS = {
    **{"q": "float N G T D", "high": "float N P D", "low": "float N P D"},
    **{"candidates": "count R T", "chosen": "count N G T W"},
}
MOST = {"head_dim": SIZE, "length": 2**40}


class ChoicePlan:
    """Sizes, and what the pointers must be. Candidates beyond 0 .. P are taken for the nearest of these."""

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            checks.number(OP, name, size, 1, MOST.get(name, COUNT))
        checks.choice(OP, "lines that are left over by the rows", sizes["lines"] % sizes["rows"], (0,))
        checks.number(OP, "width", sizes["width"], 1, sizes["pages"])
        self.sizes = sizes
        letters = {"N": "lines", "G": "groups", "T": "length", "P": "pages", "D": "head_dim", "R": "rows", "W": "width"}
        numbers = {letter: sizes[name] for letter, name in letters.items()}
        self._pointers = declared_pointers(FIELDS, numbers, torch.float32)

    def new(self, name: str) -> Tensor:
        return self._pointers[name].new()

    def problem(self, threads: int, **tensors: Tensor) -> Choice:
        """tensors: all of `FIELDS`."""
        checks.number(OP, "threads", threads, 1, MOST_THREADS)
        given = Choice(threads=threads, **self.sizes)
        for name, pointer in self._pointers.items():
            if name not in tensors:
                raise checks.missing(OP, name)
            setattr(given, name, pointer.to(tensors[name]))
        keep: Any = given
        keep.tensors = tensors  # alive as long as their addresses
        return given


@functools.lru_cache(maxsize=64)
def choice_plan(**sizes: int) -> ChoicePlan:
    return ChoicePlan(**sizes)
