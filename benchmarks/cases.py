"""What `attention.py` measures: our mechanisms, the three modes, and the check that comes before any time."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import subquad
from subquad.kernels.cpu import library
from subquad.mechanism import Mechanism, state_bytes
from subquad.testing import relative_error

MODES = ("forward", "forward+backward", "decode")
EXACT = "sdpa"
FEATURES = 256
HALF = "favor, half"  # with half of the features
TOLERANCE = 1e-5  # float32 against float64; the worst of our cases is near 2e-6
STEPS = 64  # tokens decoded per sample: as many as a near block, so each sample folds one block
GATE_HEADS = 2  # as many parts as a mixed layer has here
GATE_LENGTH = 200  # tokens: enough for a far field behind the near blocks, and for a block that is not full
DECODE_OPTIONS = 16_384  # the length whose options are used for decoding
PIECE = 1024  # tokens at once while a context is read in


class Shape(NamedTuple):
    """Batch is 1."""

    heads: int
    length: int
    head_dim: int


class Attend(Protocol):
    """Attention made for one shape and one direction."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Gated(Attend, Protocol):
    """Attention that can be checked."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Its dense definition, in float64."""
        ...


@dataclass(frozen=True)
class Case:
    """One row of the tables.

    `features` (M) is given where products are counted; `mechanism` where it can decode; `multiple` divides every
    length it takes; `about` says what is timed where the name does not.
    """

    name: str
    make: Callable[[Shape, bool], Attend]
    directions: tuple[bool, ...] = (False, True)  # of `causal`
    gated: bool = True
    peer: bool = False
    quadratic: bool = False
    multiple: int = 1
    features: int = 0
    mechanism: Callable[[Shape], Mechanism] | None = None
    about: str = ""

    def decodes(self) -> bool:
        return self.name == EXACT or self.mechanism is not None


# Our cases ------------------------------------------------------------------------------------------------------------


class Exact:
    """Torch's own kernel, called without anything of ours around it."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        self.causal = causal
        self.definition = subquad.attention("softmax", head_dim=shape.head_dim)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.definition.reference(q, k, v, causal=self.causal)


class Ours:
    """A mechanism of subquad."""

    def __init__(self, mechanism: Callable[[Shape], Mechanism], shape: Shape, causal: bool) -> None:
        self.mechanism, self.causal = mechanism(shape), causal

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mechanism(q, k, v, causal=self.causal)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mechanism.reference(q, k, v, causal=self.causal)


def even_root(length: int) -> int:
    """The even number whose square is about length / 64: buckets per hash where two hashes make one bucket of 64."""
    return max(2, 2 * round((length / 64) ** 0.5 / 2))


def halves(heads: int) -> list[dict]:
    """Parts of `mixed`: features on the first half of the heads, exact attention on the second."""
    half = (heads + 1) // 2
    favor = {"attention": "favor", "heads": [*range(half)], "num_features": FEATURES}
    exact = {"attention": "softmax", "heads": [*range(half, heads)]}
    return [part for part in (favor, exact) if part["heads"]]


# Options that go with the shape: what these methods cost depends on them. Buckets hold some 64 keys at any length, and
# are found by two hashes, since one needs length / 128 products per token; centroids are as many as in the Routing
# Transformer, the square root of the length.
SPARSE = {
    "window": lambda _: {"window": 256},
    "linformer": lambda shape: {"rank": 256, "max_length": shape.length},
    "lsh": lambda shape: {"num_buckets": even_root(shape.length) ** 2, "hashes": 2, "bucket_size": 64, "rounds": 4},
    "cluster": lambda shape: {"num_clusters": round(shape.length**0.5), "bucket_size": 64},
    "strided": lambda shape: {"stride": max(16, round(shape.length**0.5 / 16) * 16)},
    "mixed": lambda shape: {"parts": halves(shape.heads)},
    "pages": lambda _: {"pages": 16, "page": 16, "window": 128},
}


def our_cases() -> tuple[list[Case], list[str]]:
    """The cases this machine can run, and a line about those it cannot."""
    cases, notes = [Case(EXACT, Exact, quadratic=True), _ours("identity", "identity")], []
    favor, paper = {"num_features": FEATURES}, {"num_features": FEATURES, "near": 0, "sinks": 0}
    for name, mechanism, options in (
        ("linear", "linear", {}),
        ("favor", "favor", favor),
        ("favor-paper", "favor", paper),
    ):
        if library.AVAILABLE:
            cases.append(_ours(name, mechanism, backend="cpu", **options))
        cases.append(_ours(f"{name} (torch)", mechanism, backend="torch", **options))
    if library.AVAILABLE:
        cases.append(_ours(HALF, "favor", num_features=FEATURES // 2, backend="cpu"))
    else:
        notes.append(f"no native engine, so only torch's: {library.WHY_MISSING}")
    return [*cases, *map(_sparse, SPARSE)], notes


def _ours(name: str, mechanism: str, **options: object) -> Case:
    make = partial(_attention, mechanism, lambda _: options)
    features = options["num_features"] if mechanism == "favor" else 0
    return Case(name, partial(Ours, make), mechanism=make, features=cast(int, features))


def _sparse(name: str) -> Case:
    kind = next(mechanism for mechanism in subquad.MECHANISMS if mechanism.name == name)

    def decoding(shape: Shape) -> Mechanism:
        return _attention(name, SPARSE[name], shape._replace(length=DECODE_OPTIONS))

    return Case(
        name,
        partial(Ours, partial(_attention, name, SPARSE[name])),
        directions=tuple(
            causal for causal in (False, True) if (kind.supports_causal if causal else kind.supports_bidirectional)
        ),
        mechanism=decoding if kind.supports_state else None,
    )


def _attention(name: str, options: Callable[[Shape], dict], shape: Shape) -> Mechanism:
    return subquad.attention(name, head_dim=shape.head_dim, **options(shape))


# Modes ----------------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A call to be timed, how many results it makes, and the bytes that it needs to stay in memory between calls."""

    call: Callable[[], object]
    results: int = 1
    state_bytes: int = 0


def inputs(shape: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *shape, generator=generator).requires_grad_() for _ in range(3)]


def prepare(case: Case, mode: str, causal: bool, shape: Shape, tensors: list[Tensor]) -> Prepared:
    """What is done once is done here; `tensors` are the inputs, which decoding does without."""
    if mode == "decode":
        return _decode_exactly(shape) if case.mechanism is None else _decode(case.mechanism(shape), shape)
    attend = case.make(shape, causal)
    if mode == "forward":
        return Prepared(torch.no_grad()(partial(attend, *tensors)))
    direction = torch.ones_like(tensors[2])
    return Prepared(lambda: torch.autograd.grad(attend(*tensors), tensors, direction, allow_unused=True))


def _decode(mechanism: Mechanism, shape: Shape) -> Prepared:
    """STEPS tokens, one at a time, from the state after the context."""
    tokens = [t.detach() for t in inputs(shape._replace(length=STEPS))]
    state = None
    with torch.inference_mode():
        for start in range(0, shape.length, PIECE):  # in pieces, so that the context is never in memory
            size = min(PIECE, shape.length - start)
            q, k, v = torch.randn(3, 1, *shape._replace(length=size))
            state = mechanism.extend(q, k, v, state)[1]
    assert state is not None
    before = state

    @torch.inference_mode()
    def steps() -> Tensor:
        state, out = before, tokens[2]
        for i in range(STEPS):
            q, k, v = (t[:, :, i : i + 1] for t in tokens)
            out, state = mechanism.extend(q, k, v, state)
        return out

    return Prepared(steps, STEPS, state_bytes(before))


def _decode_exactly(shape: Shape) -> Prepared:
    """The same with a cache of keys and values that was allocated for the context and the new tokens."""
    tokens = [t.detach() for t in inputs(shape._replace(length=STEPS))]
    keys, values = (torch.randn(1, *shape._replace(length=shape.length + STEPS)) for _ in range(2))

    @torch.inference_mode()
    def steps() -> Tensor:
        out = tokens[2]
        for i in range(STEPS):
            q, k, v = (t[:, :, i : i + 1] for t in tokens)
            end = shape.length + i + 1
            keys[:, :, end - 1 : end] = k
            values[:, :, end - 1 : end] = v
            out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end])
        return out

    return Prepared(steps, STEPS, keys.nbytes + values.nbytes)


# The gate -------------------------------------------------------------------------------------------------------------


def problem(case: Case, head_dim: int) -> str:
    """Why this case must not be timed: outputs or gradients that are not the definition's. Empty if it may."""
    length = math.ceil(GATE_LENGTH / case.multiple) * case.multiple
    shape = Shape(GATE_HEADS, length, head_dim)
    tensors = inputs(shape)
    errors = {}
    for causal in case.directions:
        direction = "causal" if causal else "bidirectional"
        attend = case.make(shape, causal)
        out, gradients = _differentiate(attend, tensors)
        if not case.gated:  # nothing to compare with, but numbers they must be
            ok = out.shape == tensors[2].shape and all(t.isfinite().all() for t in (out, *gradients))
            errors[f"{direction} result"] = 0.0 if ok else math.nan
            continue
        with one_thread():
            definition = cast(Gated, attend).reference
            want, wanted = _differentiate(definition, [t.detach().double().requires_grad_() for t in tensors])
        errors[f"{direction} output"] = relative_error(out, want)
        for name, got, gradient in zip("qkv", gradients, wanted, strict=True):
            errors[f"{direction} gradient of {name}"] = relative_error(got, gradient)
    if case.mechanism is not None:
        errors["decoding"] = _decoding_error(case.mechanism(shape), tensors)
    wrong = [f"{what} {error:.1e}" for what, error in errors.items() if not error < TOLERANCE]  # NaN is not below
    return ", ".join(wrong)


@contextmanager
def one_thread() -> Iterator[None]:
    """For definitions, which are thousands of small operations: with threads that share a busy core each one waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _differentiate(attend: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = attend(*tensors)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out.shape, generator=generator).to(out.dtype)
    # zeros where an output does not depend on an input, as in identity
    return out, torch.autograd.grad(out, tensors, direction, allow_unused=True, materialize_grads=True)


@torch.no_grad()
def _decoding_error(mechanism: Mechanism, tensors: list[Tensor]) -> float:
    """Two pieces, then tokens one by one, against the definition on the whole."""
    state, outputs, length = None, [], tensors[0].shape[2]
    borders = [0, 70, 150, *range(151, length + 1)]
    for start, end in pairwise(borders):
        q, k, v = (t[:, :, start:end] for t in tensors)
        out, state = mechanism.extend(q, k, v, state)
        outputs.append(out)
    with one_thread():
        want = mechanism.reference(*(t.double() for t in tensors), causal=True)
    return relative_error(torch.cat(outputs, dim=2), want)
