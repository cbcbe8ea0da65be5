"""What the C++ engine may be given for sparse attention: declared here, and checked by the gate like all else.

Letters as in `kernels/sparse/torch.py`.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.kernels.cpu.gate import COUNT, MOST_THREADS, OP, SIZE, check_factor, declared_pointers
from subquad.kernels.cpu.library import Sparse

LABELS = {"q_place": "label N C", "k_place": "label J E", "q_code": "label N C R", "k_code": "label J E R"}
LABELS_ALIKE = {"q_place": "label C", "k_place": "label WE", "alive": "flag J E"}
FIELDS = {
    **{"q": "float N C D", "k": "float J E D", "v": "float J E Dv", "meets": "count N W"},
    **{"out": "float N C Dv", "log_normaliser": "log N C", "grad_out": "float N C Dv", "shift": "log N C"},
    **{"dq": "made N C D", "dk": "made J E D", "dv": "made J E Dv"},
}
NEEDED = ("q", "k", "v", "meets", "q_place", "k_place", "log_normaliser")
NEEDED_BY_BACKWARD = ("grad_out", "shift", "dq", "dk", "dv")


class SparsePlan:
    """Sizes, and what the pointers must be. Numbers of blocks outside of 0 .. J - 1 are passed over by C++."""

    def __init__(self, alike: bool, **sizes: int) -> None:
        for name, size in sizes.items():
            least = 0 if name == "rounds" else 1
            checks.number(OP, name, size, least, COUNT if name in ("tiles", "blocks") else SIZE)
        panel = 2 * 64 // 4  # two of the widest vectors; products of these sizes are int in C++
        widest = max(sizes["head_dim"], sizes["value_dim"]) + panel
        for what, count in (("keys of a block", sizes["keys"] + panel), ("rows of a tile", sizes["rows"] + panel)):
            if count * widest > COUNT:
                raise checks.too_large(OP, what, count * widest, COUNT)
        self.alike, self.sizes = alike, sizes
        letters = {"N": "tiles", "C": "rows", "J": "blocks", "E": "keys", "W": "met", "R": "rounds"}
        letters |= {"D": "head_dim", "Dv": "value_dim"}
        numbers = {letter: sizes[name] for letter, name in letters.items()} | {"WE": sizes["met"] * sizes["keys"]}
        declared = FIELDS | (LABELS_ALIKE if alike else LABELS)
        self._pointers = declared_pointers(declared, numbers, torch.float32)

    def new(self, name: str) -> Tensor:
        return self._pointers[name].new()

    def problem(self, threads: int, scale: float, bounds: dict[str, int], tensors: dict[str, Tensor | None]) -> Sparse:
        """tensors: by the names of the fields; a forward has no grad_out."""
        checks.number(OP, "threads", threads, 1, MOST_THREADS)
        check_factor("scale", scale)
        for name, bound in bounds.items():
            checks.number(OP, name, bound, 0 if name == "round" else -COUNT, COUNT)
        given = Sparse(threads=threads, alike=self.alike, scale=scale, **bounds, **self.sizes)
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        needed = (*NEEDED, *(NEEDED_BY_BACKWARD if "grad_out" in present else ("out",)))
        for name in (*needed, "q_code", "k_code") if self.sizes["rounds"] else needed:
            if name not in present:
                raise checks.missing(OP, name)
        for name, tensor in present.items():
            if name not in self._pointers:
                raise checks.unasked(OP, name, f"tiles have labels {'in common' if self.alike else 'of their own'}")
            setattr(given, name, self._pointers[name].to(tensor))
        keep: Any = given
        keep.tensors = present  # alive as long as their addresses
        return given


@functools.lru_cache(maxsize=64)
def sparse_plan(alike: bool, **sizes: int) -> SparsePlan:
    return SparsePlan(alike, **sizes)
