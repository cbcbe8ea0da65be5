"""What `extend` carries from call to call: declared once by each mechanism, made empty and checked from that."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from subquad import checks
from subquad.errors import BackendError, DtypeError, ShapeError

MOST_TOKENS = 2**62  # positions are int64, and a few are added to them
FEW = 64
STRIDED = torch.strided

SomeState = TypeVar("SomeState", bound=tuple)


class StateField(NamedTuple):
    """One tensor of a state. A letter in its shape is any size, the same wherever it stands.

    kind: "kept" (the dtype of k), "sum" (that of sums: float32, or float64 for float64), "count" (int64 between the
    bounds, both included), "flag" (bool). empty: what it holds before the first token. least: the smallest sum there
    can be; half precision makes -inf of it, and conversion makes it what it was.
    """

    kind: str
    shape: tuple[int | str, ...]
    empty: float = 0.0
    low: int | None = None
    high: int | None = None
    least: float = -math.inf

    def dtype(self, k: Tensor) -> torch.dtype:
        return _dtypes(k)[self.kind]

    def new(self, k: Tensor) -> Tensor:
        """Before the first token: letters are sizes of 0."""
        shape = tuple(0 if isinstance(size, str) else size for size in self.shape)
        return k.new_full(shape, int(self.empty) if self.kind == "count" else self.empty, dtype=self.dtype(k))


Fields = Mapping[str, StateField]


def kept(*shape: int | str) -> StateField:
    return StateField("kept", shape)


def summed(*shape: int | str, empty: float = 0.0, least: float = -math.inf) -> StateField:
    return StateField("sum", shape, empty, least=least)


def counted(*shape: int | str, most: int = MOST_TOKENS - 1) -> StateField:
    return StateField("count", shape, 0, 0, most)


def named(*shape: int | str, empty: int, low: int | None = None, high: int | None = None) -> StateField:
    """Whole numbers that name something; bounds where they become an index."""
    return StateField("count", shape, empty, low, high)


def flagged(*shape: int | str) -> StateField:
    return StateField("flag", shape)


def empty(kind: type[SomeState], fields: Fields, k: Tensor) -> SomeState:
    return kind(*(field.new(k) for field in fields.values()))


def state(op: str, state: Any, kind: type[SomeState], fields: Fields, k: Tensor) -> SomeState:
    """The state, if the same mechanism made it for such inputs, with every tensor in the dtype that it must have; an
    empty one for None.

    Floating-point tensors of another precision are converted, except for float64 inputs: who computes in float64 wants
    all of its digits, and a state of float32 has lost them. Counts, names and flags must be int64 and bool, counts in
    their bounds (looked at on CPUs; elsewhere they are used by torch operations alone, which look themselves).
    NaN and infinities are let through: a NaN among the inputs leaves them, and they only ever lead to NaN.
    """
    if state is None:
        return empty(kind, fields, k)
    if not isinstance(state, kind) or len(state) != len(fields):
        raise ShapeError(f"{op}: state must be a {kind.__name__} returned by extend, got {type(state).__name__}")
    sizes: dict[str, int] = {}
    dtypes, device, tensors = _dtypes(k), k.device, []  # once for all of them: this runs with every token
    for (name, field), tensor in zip(fields.items(), state, strict=True):
        usual = (
            type(tensor) is Tensor
            and not tensor.is_nested
            and tensor.layout is STRIDED
            and tensor.dtype is dtypes[field.kind]
            and tensor.shape == field.shape
            and tensor.device == device
        )
        fitting = tensor if usual else _checked(op, name, tensor, field, sizes, k)
        if field.low is not None or field.high is not None:
            _check_values(op, name, fitting, field)
        tensors.append(fitting)
    return kind(*tensors)


def _dtypes(k: Tensor) -> dict[str, torch.dtype]:
    """Of the kinds of tensors in the state."""
    sums = torch.float32 if k.dtype is torch.float32 else torch.promote_types(k.dtype, torch.float32)
    return {"kept": k.dtype, "sum": sums, "count": torch.int64, "flag": torch.bool}


def _checked(op: str, name: str, tensor: Any, field: StateField, sizes: dict[str, int], k: Tensor) -> Tensor:
    """All but its values: the tensor, converted if that loses nothing, or an error that says what is wrong."""
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{op}: state.{name} must be a torch.Tensor, got {type(tensor).__name__}")
    checks.dense_layout(op, f"state.{name}", tensor)
    shape = field.shape
    if tensor.shape != shape and not _fits(tensor, shape, sizes):
        sizes_wanted = (sizes.get(size, "any") if isinstance(size, str) else size for size in shape)
        raise ShapeError(
            f"{op}: state.{name} must be [{', '.join(map(str, sizes_wanted))}] for these inputs, "
            f"got {checks.shape_of(tensor)}; it comes from another batch or mechanism"
        )
    if tensor.device != k.device:
        raise BackendError(f"{op}: state.{name} is on {tensor.device}, k on {k.device}; move one of them")
    wanted = field.dtype(k)
    if tensor.dtype is not wanted:
        return _converted(op, name, tensor, wanted, k).clamp(min=field.least)
    return tensor


def _fits(tensor: Tensor, shape: Sequence[int | str], sizes: dict[str, int]) -> bool:
    if tensor.dim() != len(shape):
        return False
    wanted = (
        sizes.setdefault(want, got) if isinstance(want, str) else want
        for want, got in zip(shape, tensor.shape, strict=True)
    )
    return all(want == got for want, got in zip(wanted, tensor.shape, strict=True))


def _converted(op: str, name: str, tensor: Tensor, wanted: torch.dtype, k: Tensor) -> Tensor:
    got = checks.dtype_name(tensor.dtype)
    if not wanted.is_floating_point or tensor.dtype not in checks.FLOAT_DTYPES:
        raise DtypeError(f"{op}: state.{name} must be {checks.dtype_name(wanted)}, got {got}")
    if wanted == torch.float64:
        inputs = checks.dtype_name(k.dtype)
        raise DtypeError(f"{op}: state.{name} is {got}, but q, k and v are {inputs}; keep one dtype per sequence")
    return tensor.to(wanted)


def values_of(tensor: Tensor) -> list[int] | None:
    """The numbers, or the smallest and the largest of many; None where looking at them would wait for a device, or
    where there are none (traced graphs)."""
    if type(tensor) is not Tensor or not tensor.is_cpu or torch.compiler.is_compiling() or checks.transformed():
        return None
    if tensor.numel() > FEW:
        return [int(x) for x in tensor.aminmax()]
    return (tensor if tensor.dim() == 1 else tensor.flatten()).tolist()


def _check_values(op: str, name: str, tensor: Tensor, field: StateField) -> None:
    for value in values_of(tensor) or ():
        if (field.low is not None and value < field.low) or (field.high is not None and value > field.high):
            raise ShapeError(
                f"{op}: state.{name} must lie between {field.low} and {field.high}, got {value}; "
                "it comes from another mechanism, or was changed"
            )


def lengths_kept(op: str, length: Tensor, most: int, where: str) -> None:
    """No more tokens than the state holds."""
    for value in values_of(length) or ():
        if value > most:
            raise ShapeError(f"{op}: state.length says {value} tokens, but {where} hold {most}; the state was changed")


def one_value(op: str, name: str, tensor: Tensor) -> None:
    """One for all sequences of the batch."""
    values = values_of(tensor) or [0]
    if min(values) != max(values):
        raise ShapeError(
            f"{op}: state.{name} must be the same for all sequences, got {min(values)} and {max(values)}; "
            "the state was put together from several"
        )
