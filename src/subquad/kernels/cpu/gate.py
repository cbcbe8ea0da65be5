"""The gate to the C++ engine: an address is handed out here only, and only of what `api.hpp` says it must be.

`NUMBERS` are the bounds of a problem's numbers, `FIELDS` says what every pointer must be. Both are checked whoever
calls: a wrong tensor from Python must become an error, never a read or write outside of its memory.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from subquad.checks import dense_layout
from subquad.checks import engine as checks
from subquad.kernels.cpu.library import DTYPES, KEPT, Array, Backward, Forward, Problem, Step

OP = "cpu engine"
STRIDED = torch.strided
TILE = 64  # as in tokens.hpp
EXP, GROUPS = 0, 2  # of `Kind` and `Rule` in api.hpp
COUNT = 2**31 - 1  # an int32
SIZE = 2**25  # what C++ multiplies by a vector's width as int
MOST_THREADS = 4096
MOST_NUMBERS = 2**59  # of one tensor: C++ counts its bytes in int64

NUMBERS = {
    **{"dtype": (0, 2), "kind": (0, 5), "rule": (0, 2), "rule_groups": (1, SIZE)},
    **{"batch": (1, COUNT), "key_heads": (1, COUNT), "groups": (1, COUNT), "map_heads": (1, COUNT)},
    **{"head_dim": (1, SIZE), "value_dim": (1, SIZE), "num_features": (1, SIZE), "sinks": (0, SIZE)},
    **{"causal": (0, 1), "gaussian": (0, 1), "near_blocks": (0, 1), "mask_batch": (1, COUNT)},
    **{"block": (1, SIZE), "blocks_per_segment": (1, TILE), "threads": (1, MOST_THREADS)},
    **{"slices": (1, MOST_THREADS), "stretches": (1, MOST_THREADS), "tile": (1, TILE)},
    **{"near": (1, SIZE), "reach": (1, SIZE), "far": (0, 1)},
    **{"length": (1, 2**40), "key_length": (1, 2**40)},
}

# Of each pointer its kind, and its sizes in the letters of `_sizes`. rows: an `Array` of the inputs' dtype; kept: the
# same, dense; float: float32; made: float32, allocated for this call; low: int8; flag: bool; count: int64;
# label: int32; log: float64.
KEPT_FIELDS = {
    **{"sink_k": "kept B K sinks D", "sink_v": "kept B K sinks Dv"},
    **{"block_k": "kept B K blocks D", "block_v": "kept B K blocks Dv"},
    **{"far_max": "float B K kept_maxima", "far_sum": "float B K kept_M V", "far_low": "float B K kept_M V"},
}
FIELDS: dict[type[Structure], dict[str, str]] = {
    Problem: {
        **{"q": "rows B H T D", "k": "rows B K S D", "v": "rows B K S Dv"},
        **{"sink_k": "rows B K sinks D", "sink_v": "rows B K sinks Dv"},
        **{"query": "float maps M D", "key": "float maps M D", "key_bias": "float maps M"},
        **{"offset_weight": "float maps D", "offset_bias": "float maps"},
        **{"alive": "flag masks S", "fold": "flag masks S", "sink_seen": "count masks T"},
        **{"far_max": "float B K maxima", "far_sum": "float B K M V"},
    },
    Forward: {
        **{"out": "made B H T Dv", "normaliser": "made B H T norms"},
        **{"low": "low B H T Dv", "borders_max": "made borders B K maxima", "borders_sum": "made borders B K M+1 V"},
        **{"far_max": "made B K maxima", "far_sum": "made B K M V"},
    },
    Backward: {
        **{"grad_out": "rows B H T Dv", "out": "rows B H T Dv", "normaliser": "float B H T norms"},
        **{"low": "low B H T Dv", "borders_max": "float borders B K maxima", "borders_sum": "float borders B K M+1 V"},
        **{"dq": "made B H T D", "dk": "made B K S D", "dv": "made B K S Dv"},
        **{"dsink_k": "made slices B K sinks D", "dsink_v": "made slices B K sinks Dv"},
        **{"dquery": "made B K M D", "dkey": "made B K M D", "dkey_bias": "made B K M"},
        **{"doffset_weight": "made slices B K D", "doffset_bias": "made slices B K"},
        **{"grad_last_far_sum": "float B K M V", "dfar_sum": "made B K M V"},
    },
    Step: {
        **{"real": "flag B", "length": "count B", "out": "made B H T Dv"},
        **KEPT_FIELDS,
        **{f"new_{name}": declared for name, declared in KEPT_FIELDS.items()},
    },
}

NEEDED: dict[type[Structure], tuple[str, ...]] = {
    Problem: ("q", "k", "v"),
    Forward: ("out", "normaliser"),
    Backward: ("grad_out", "out", "normaliser", "borders_max", "borders_sum", "dq", "dk", "dv"),
    Step: ("far_sum", "far_low", "out"),
}
NEEDED_BY_EXP = {Problem: ("query", "key", "key_bias"), Step: ("far_max",)}
SINKS = {"sink_k", "sink_v", "sink_seen", "dsink_k", "dsink_v", "length"}
BLOCKS = {"block_k", "block_v", "length"}
BORDERS = {"borders_max", "borders_sum"}
TOGETHER = {
    Problem: (("query", "key"), ("offset_weight", "offset_bias"), ("far_max", "far_sum")),
    Forward: (("borders_max", "borders_sum"), ("far_max", "far_sum")),
}


@dataclass(frozen=True, slots=True)
class Pointer:
    """What one pointer must be. With slots, which Python reads faster than anything else: one token asks for many."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    number: int  # bytes of one
    bytes: int  # of all, if dense
    strides: tuple[int, ...]  # of rows, if dense
    is_rows: bool
    declared: tuple[str, tuple[int, ...]]  # kind and shape: what it takes to be right

    def new(self) -> Tensor:
        """One that needs no check."""
        return torch.empty(*self.shape, dtype=self.dtype, device="cpu")  # a tuple would take a microsecond more

    def to(self, tensor: Tensor) -> Array | int | None:
        """The address of a tensor, with its strides where those are free; null if there is nothing to read."""
        if type(tensor) is not Tensor and _has_no_numbers(tensor):
            raise checks.not_plain(OP, self.name, tensor)
        if tensor.is_nested or tensor.layout is not STRIDED:
            dense_layout(OP, self.name, tensor)
        if tensor.dtype is not self.dtype:
            raise checks.wrong_dtype(OP, self.name, tensor, [self.dtype])
        if self.shape != tensor.shape:  # in this order it takes half the time
            raise checks.wrong_shape(OP, self.name, tensor, self.shape)
        if not self.bytes and tensor.is_cpu:
            return Array() if self.is_rows else None
        address, dense, rows = tensor.data_ptr(), tensor.is_contiguous(), self.is_rows
        if not (address and tensor.is_cpu and (dense or rows)) or address % self.number or tensor.is_neg():
            raise checks.unreadable(OP, self.name, tensor)
        if self.kind == "made":  # its storage is not asked for: autograd would copy gradients instead of taking them
            return address
        strides, reach = (self.strides, self.bytes) if dense else self._strides(tensor)
        end, there = tensor.storage_offset() * self.number + reach, tensor.untyped_storage().nbytes()
        if end > there:
            raise checks.beyond_memory(OP, self.name, int(end), there)
        return Array(address, *strides) if rows else address

    def _strides(self, tensor: Tensor) -> tuple[tuple[int, int, int], int]:
        """Of the first three dimensions, 0 where nothing is stepped over; and the bytes from the first to the last."""
        (batches, heads, tokens, width), (batch, head, token, last) = self.shape, tensor.stride()
        if width > 1 and last != 1:
            raise checks.unreadable(OP, self.name, tensor)
        reach = batch * (batches - 1) + head * (heads - 1) + token * (tokens - 1) + width
        strides = batch if batches > 1 else 0, head if heads > 1 else 0, token if tokens > 1 else 0
        return strides, reach * self.number


def _has_no_numbers(tensor: Any) -> bool:
    """Something else than a tensor, or one whose operations do something else than their name says (a fake one)."""
    return not isinstance(tensor, Tensor) or has_own_operations(tensor)


def has_own_operations(tensor: Tensor) -> bool:
    """A subclass that does something else, such as a fake tensor; a parameter is none of them."""
    return getattr(type(tensor), "__torch_dispatch__") is not getattr(Tensor, "__torch_dispatch__")  # noqa: B009 - it is not declared


class Plan:
    """One kind of problem: its numbers, and what its pointers must be."""

    def __init__(self, **numbers: int) -> None:
        _check_numbers(numbers)
        self.numbers = numbers
        self._template = Problem(**numbers)
        self._pointers = {structure: _pointers(numbers, fields) for structure, fields in FIELDS.items()}
        self._needed = {structure: tuple(sorted(self._needed_by(structure))) for structure in FIELDS}
        self._complete: set[tuple[Any, ...]] = set()  # names that were given together, and are enough

    def _needed_by(self, structure: type[Structure]) -> set[str]:
        names, n = set(NEEDED[structure]), self.numbers
        if n["kind"] == EXP:
            names.update(NEEDED_BY_EXP.get(structure, ()))
        names |= SINKS & FIELDS[structure].keys() if n["sinks"] else set()
        names |= BLOCKS & FIELDS[structure].keys() if n["near_blocks"] else set()
        names -= set() if n["far"] else BORDERS
        return names

    def problem(self, root: float, /, **tensors: Tensor | None) -> Problem:
        check_factor("root", root)
        given = Problem.from_buffer_copy(self._template)
        given.root = root
        self.fill(given, **tensors)
        self._check_features(tensors.get("query") is None)
        return given

    def _check_features(self, without_map: bool) -> None:
        """C++ reads them where the tokens lie."""
        if without_map and self.numbers["num_features"] != self.numbers["head_dim"]:
            raise checks.missing(OP, "query")

    def fill(self, structure: Any, /, **tensors: Tensor | None) -> Any:
        """`structure` with addresses of tensors, which it keeps alive."""
        kind, given = type(structure), []
        pointers = self._pointers[kind]
        before = address = declared = None  # maps of queries and of keys are often one tensor
        for name, tensor in tensors.items():
            if tensor is not None:
                pointer = pointers[name]
                if tensor is not before or pointer.declared != declared:
                    before, address, declared = tensor, pointer.to(tensor), pointer.declared
                setattr(structure, name, address)
                given.append(name)
        found = (kind, *given)
        if found not in self._complete:
            _check_names(kind, given, self._needed[kind])
            self._complete.add(found)
        structure.tensors = tensors
        return structure


INPUTS = ("q", "k", "v", "query", "key", "key_bias", "offset_weight", "offset_bias")  # of a step


class StepPlan(Plan):
    """One token more for every sequence. It comes so often that tensors stand in the order of `INPUTS` and `KEPT`
    instead of having names, and the caller keeps them alive. A state without positions has the last of `KEPT` alone."""

    def __init__(self, root: float, **numbers: int) -> None:
        super().__init__(**numbers)
        check_factor("root", root)
        self._template.root = root
        self._has_positions = numbers["kind"] == EXP
        self._first = 0 if self._has_positions else KEPT.index("far_max")
        self._inputs = tuple(self._pointers[Problem][name] for name in INPUTS)
        of_step = self._pointers[Step]
        self._kept = tuple(of_step[name] for name in KEPT[self._first :])
        self._real, self._length, self._out = of_step["real"], of_step["length"], of_step["out"]

    def given(self, inputs: Sequence[Tensor | None]) -> Problem:
        found: list[Any] = []
        absent: tuple[str, ...] = ()
        before = address = None  # maps of queries and of keys are often one tensor, and declared alike
        for pointer, tensor in zip(self._inputs, inputs, strict=True):
            if tensor is None:
                absent, address = (*absent, pointer.name), None
            elif tensor is not before or pointer.name != "key":
                address = pointer.to(tensor)
            before = tensor
            found.append(address)
        if absent not in self._complete:
            self._check_absent(absent)
            self._complete.add(absent)
        given = Problem.from_buffer_copy(self._template)
        given.q, given.k, given.v, given.query, given.key, given.key_bias = found[:6]
        given.offset_weight, given.offset_bias = found[6:]
        return given

    def _check_absent(self, names: tuple[str, ...]) -> None:
        needed = self._needed_by(Problem) - SINKS  # those of a state are in `Step`
        _check_names(Problem, [name for name in INPUTS if name not in names], tuple(sorted(needed)))
        self._check_features("query" in names)

    def read(self, real: Tensor | None, length: Tensor | None, kept: Sequence[Tensor]) -> list[Any]:
        """Addresses of what `new_step` hands over; no tensor of a state may be left out."""
        found: list[Any] = [None if real is None else self._real.to(real)]
        found.append(self._length.to(cast(Tensor, length)) if self._has_positions else None)  # which refuses None
        found += [None] * self._first
        found += [pointer.to(tensor) for pointer, tensor in zip(self._kept, kept, strict=True)]
        return found

    def new_step(
        self, read: list[Any], kept: Sequence[Tensor], changed: Iterable[int]
    ) -> tuple[Step, Tensor, list[Tensor]]:
        """Also what C++ fills: the output, and `kept` with new tensors at the places `changed`.

        read: what `read` made of the same tensors, which therefore can serve as patterns.
        """
        new, written = list(kept), [0] * len(KEPT)
        for place in changed:
            new[place] = made = torch.empty_like(kept[place])
            written[self._first + place] = made.data_ptr()
        out = self._out.new()
        return Step(*read, *written, out.data_ptr()), out, new


def new_like(structure: Structure, names: Iterable[str], patterns: Iterable[Tensor]) -> list[Tensor]:
    """Tensors for C++ to fill, each declared like its pattern, which passed the gate; `structure` points to them."""
    made = [torch.empty_like(tensor) for tensor in patterns]
    for name, tensor in zip(names, made, strict=True):
        setattr(structure, name, tensor.data_ptr())
    return made


def check_factor(name: str, value: float) -> None:
    """What C++ multiplies by."""
    checks.number(OP, name, value, 2**-1000, 2**1000)


def _check_names(kind: type[Structure], given: list[str], needed: tuple[str, ...]) -> None:
    for name in needed:
        if name not in given:
            raise checks.missing(OP, name)
    for one, other in TOGETHER.get(kind, ()):
        if (one in given) != (other in given):
            raise checks.missing(OP, other if one in given else one)


@functools.lru_cache(maxsize=64)
def plan(**numbers: int) -> Plan:
    return Plan(**numbers)


def _check_numbers(numbers: dict[str, int]) -> None:
    for name, (low, high) in NUMBERS.items():
        checks.number(OP, name, numbers[name], low, high)
    n = numbers
    checks.choice(OP, "map_heads", n["map_heads"], (1, n["key_heads"]))
    checks.choice(OP, "mask_batch", n["mask_batch"], (1, n["batch"]))
    features, units = n["num_features"], n["rule_groups"] if n["rule"] == GROUPS else n["num_features"]
    checks.choice(OP, "features that are left over by the groups", features % n["rule_groups"], (0,))
    checks.number(OP, "slices", n["slices"], 1, units if n["kind"] == EXP else 1)
    checks.number(OP, "stretches", n["stretches"], 1, 1 if n["kind"] == EXP else MOST_THREADS)
    if not n["near_blocks"]:
        checks.number(OP, "block", n["block"], 1, TILE)
    else:
        _check_near_blocks(n)
    if not n["far"] and not n["near_blocks"]:
        checks.number(OP, "sinks", n["sinks"], 1, SIZE)
    if n["near_blocks"] or n["causal"]:
        checks.choice(OP, "key_length", n["key_length"], (n["length"],))
    panel = 2 * 64 // 4  # the widest vectors
    numbers_of_state = (features + panel) * (max(n["head_dim"], n["value_dim"]) + panel)
    if numbers_of_state > COUNT:
        raise checks.too_large(OP, "the state of one head", numbers_of_state, COUNT)


def _check_near_blocks(n: dict[str, int]) -> None:
    """A block has one of them, or as many as fit into a tile."""
    near, block = n["near"], n["block"]
    checks.choice(OP, "tokens of a block that are left over by near blocks", block % near, (0,))
    if block > near:
        checks.number(OP, "block", block, 1, n["tile"])
    exact = (2 * (n["reach"] * near + block) + block + n["sinks"]) * TILE  # the logits of a tile
    if exact > COUNT:
        raise checks.too_large(OP, "the exact logits of one tile", exact, COUNT)


def _sizes(n: dict[str, int]) -> dict[str, int | None]:
    exp, blocks = n["kind"] == EXP, -(-n["length"] // n["block"])
    borders = -(-blocks // n["blocks_per_segment"]) * (1 if n["causal"] else 2)
    return {
        **{"B": n["batch"], "K": n["key_heads"], "H": n["key_heads"] * n["groups"]},
        **{"T": n["length"], "S": n["key_length"], "D": n["head_dim"]},
        **{"Dv": n["value_dim"], "V": n["value_dim"] + 1, "M": n["num_features"], "M+1": n["num_features"] + 1},
        **{"maxima": n["num_features"] if exp else 1, "norms": 2 if exp else None},
        **{"maps": n["map_heads"], "masks": n["mask_batch"], "slices": n["slices"]},
        **{"sinks": n["sinks"], "blocks": (n["reach"] + 1) * n["near"] if n["near_blocks"] else 0},
        **{"kept_M": n["num_features"] * n["far"], "kept_maxima": (n["num_features"] if exp else 1) * n["far"]},
        "borders": borders if n["causal"] or n["near_blocks"] else 1,
    }


def _pointers(numbers: dict[str, int], fields: dict[str, str]) -> dict[str, Pointer]:
    inputs = next(dtype for dtype, number in DTYPES.items() if number == numbers["dtype"])
    return declared_pointers(fields, _sizes(numbers), inputs)


def declared_pointers(
    fields: dict[str, str], sizes: Mapping[str, int | None], inputs: torch.dtype
) -> dict[str, Pointer]:
    dtypes = {"rows": inputs, "kept": inputs, "float": torch.float32, "made": torch.float32}
    dtypes |= {"flag": torch.bool, "count": torch.int64, "low": torch.int8, "label": torch.int32, "log": torch.float64}
    pointers = {}
    for name, declared in fields.items():
        kind, *letters = declared.split()
        shape = tuple(size for size in map(sizes.__getitem__, letters) if size is not None)
        count = math.prod(shape)
        if count > MOST_NUMBERS:
            raise checks.too_large(OP, name, count, MOST_NUMBERS)
        _, heads, tokens, width = shape if kind == "rows" else (0,) * 4
        strides = (heads * tokens * width, tokens * width, width)
        number = dtypes[kind].itemsize
        pointers[name] = Pointer(
            name=name,
            dtype=dtypes[kind],
            shape=shape,
            kind=kind,
            number=number,
            bytes=count * number,
            strides=strides,
            is_rows=kind == "rows",
            declared=(kind, shape),
        )
    return pointers
