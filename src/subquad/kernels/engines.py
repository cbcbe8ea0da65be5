"""The table of engines: what each of them can do, and why one cannot do a call.

An engine is one file per operation (`favor/torch.py`, `linear/native.py`) with the functions of `EngineOperation`, and
one line here. The engine in C++ is the backend "cpu"; its files are called `native.py`. Sparse attention
(`SparseOperation`) has no `backend` for users to choose: the first engine that can does it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from subquad import checks
from subquad.kernels.cpu import library
from subquad.kernels.cpu.gate import has_own_operations
from subquad.kernels.favor import native as favor_native
from subquad.kernels.favor import torch as favor_torch
from subquad.kernels.linear import native as linear_native
from subquad.kernels.linear import torch as linear_torch
from subquad.kernels.problem import Gradients, Outputs, Saved
from subquad.kernels.sparse import choice, choice_native
from subquad.kernels.sparse import native as sparse_native
from subquad.kernels.sparse import torch as sparse_torch
from subquad.kernels.sparse.choice import Extremes
from subquad.kernels.sparse.torch import Bounds, Inputs, Pairs

AUTO = "auto"


class EngineOperation(Protocol):
    """What a module of one operation has. inputs, options: the two records of its `inputs.py`.

    It may also have a `step`, one token of decoding, with the arguments of `favor/native.py` or `linear/native.py`;
    without it, steps are made of torch operations.
    """

    def border_count(self, length: int, heads: int, num_features: int, options: Any) -> int:
        """States that `forward` keeps for `backward`: the first size of `borders_max` and `borders_sum`."""
        ...

    def forward(self, inputs: Any, options: Any) -> Outputs:
        """The output in the dtype of q, and what `backward` needs, of the sizes that `Outputs` says."""
        ...

    def backward(self, inputs: Any, options: Any, saved: Saved, want_map: bool) -> Gradients:
        """By the names of the inputs; those of the feature map only if `want_map`."""
        ...


class SparseOperation(Protocol):
    """What `sparse/torch.py` and `sparse/native.py` have; see there."""

    def forward(self, inputs: Inputs, pairs: Pairs, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """The output and its log-normaliser."""
        ...

    def backward(
        self,
        inputs: Inputs,
        pairs: Pairs,
        bounds: Bounds,
        scale: float,
        out: Tensor | None,
        log_normaliser: Tensor,
        grads: tuple[Tensor, Tensor],
    ) -> Inputs:
        """Gradients of the inputs."""
        ...


class ChoiceOperation(Protocol):
    """What `sparse/choice.py` and `sparse/choice_native.py` have; see there."""

    def choose(self, q: Tensor, extremes: Extremes, candidates: Tensor, width: int) -> Tensor:
        """The pages that queries choose."""
        ...


@dataclass(frozen=True)
class Engine:
    """operations: an `EngineOperation` for each; devices: by type, None for any; signed: features that may be negative;
    reach: near blocks beyond the neighbours; without_far: exact attention alone; sparse, choice: a
    `SparseOperation` and a `ChoiceOperation` or None, and their dtypes; missing: why it cannot be used on this machine
    at all, or nothing."""

    name: str
    operations: Mapping[str, EngineOperation]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = checks.FLOAT_DTYPES
    near: bool = True
    signed: bool = True
    reach: bool = True
    without_far: bool = True
    gradients: bool = True
    missing: str = ""
    sparse: SparseOperation | None = None
    choice: ChoiceOperation | None = None
    sparse_dtypes: tuple[torch.dtype, ...] = checks.FLOAT_DTYPES

    def obstacle(self, operation: str, q: Tensor, **needs: bool) -> str | None:
        """Why it cannot do a call, or None. needs: as `shortcoming` names them."""
        if self.missing:
            return self.missing
        if operation not in self.operations:
            return f"it has no {operation} attention"
        if self.devices is not None and not (q.is_cpu and "cpu" in self.devices) and q.device.type not in self.devices:
            return f"the tensors are on {q.device.type}"
        if q.dtype not in self.dtypes:
            names = ", ".join(map(checks.dtype_name, self.dtypes))
            return f"it takes {names}, and the tensors are {checks.dtype_name(q.dtype)}"
        return self.shortcoming(**needs)

    def shortcoming(
        self,
        *,
        near: bool = False,
        signed: bool = False,
        gradients: bool = False,
        reach: bool = False,
        without_far: bool = False,
    ) -> str | None:
        """What it does not have, of what a call needs."""
        if near and not self.near:
            return "it has no near blocks"
        if reach and not self.reach:
            return "it has no reach beyond the neighbouring blocks"
        if without_far and not self.without_far:
            return "it has no attention without a far field (far=False)"
        if gradients and not self.gradients:
            return "it has no gradients"
        return "it has no signed (trigonometric) features" if signed and not self.signed else None


# In the order in which "auto" tries them.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "cpu",
            {"favor": favor_native, "linear": linear_native},
            devices=("cpu",),
            dtypes=tuple(library.DTYPES),
            signed=False,
            missing=library.WHY_MISSING,
            sparse=sparse_native,
            choice=choice_native,
            sparse_dtypes=(torch.float32,),  # others are converted before they come here, or float64
        ),
        Engine("torch", {"favor": favor_torch, "linear": linear_torch}, sparse=sparse_torch, choice=choice),
    )
}


def backend(op: str, name: Any) -> str:
    """A name that a user gave."""
    checks.choice(op, "backend", name, (AUTO, *ENGINES))
    return name


def choose(operation: str, backend: str, q: Tensor, **needs: bool) -> Engine:
    """The engine that was asked for, or of "auto" the first that can. needs: as `Engine.obstacle` names them."""
    if backend != AUTO:
        if reason := ENGINES[backend].obstacle(operation, q, **needs):
            raise checks.engine_cannot(operation, backend, reason)
        return ENGINES[backend]
    return next(engine for engine in ENGINES.values() if engine.obstacle(operation, q, **needs) is None)


def choose_sparse(q: Tensor) -> SparseOperation:
    """The first engine that can."""
    return next(engine.sparse for engine in _able(q) if engine.sparse is not None)


def choose_choice(q: Tensor) -> ChoiceOperation:
    """The same for choices of pages."""
    return next(engine.choice for engine in _able(q) if engine.choice is not None)


def _able(q: Tensor) -> Iterator[Engine]:
    """Engines of this machine whose sparse operations take such tensors."""
    for engine in ENGINES.values():
        able = engine.devices is None or q.device.type in engine.devices
        if able and not engine.missing and q.dtype in engine.sparse_dtypes:
            yield engine


def step_of(operation: str, backend: str, q: Tensor, *others: Tensor | None, **needs: bool) -> Any:
    """One token more by the engine for it; None if torch operations are to do it: they have gradients, and compile."""
    engine = choose(operation, backend, q, **needs)
    step = getattr(engine.operations[operation], "step", None)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *others))
    traced = torch.compiler.is_compiling() or (type(q) is not Tensor and has_own_operations(q))
    return None if gradients or traced else step
