"""Tensors that nobody should pass, and odd ones that anybody may: for `hostile_calls.py`."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHER_DTYPES = (
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *DTYPES,
)


# The same numbers, laid out in another way ----------------------------------------------------------------------------


def transposed(x: Tensor, rng: random.Random) -> Tensor:
    if x.dim() < 2:
        return x
    a, b = rng.sample(range(x.dim()), 2)
    return x.transpose(a, b).contiguous().transpose(a, b)


def within_more(x: Tensor, rng: random.Random) -> Tensor:
    """A view of a larger tensor."""
    dim = rng.randrange(x.dim()) if x.dim() else 0
    if not x.dim():
        return x
    return torch.cat([x, x], dim).narrow(dim, rng.choice((0, x.shape[dim])), x.shape[dim])


def every_other(x: Tensor, rng: random.Random) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def flipped_twice(x: Tensor, rng: random.Random) -> Tensor:
    return x.flip(-1).flip(-1) if x.dim() else x


def far_strides(x: Tensor, rng: random.Random) -> Tensor:
    """Strides beyond the memory wherever nothing is stepped over."""
    strides = [
        step if count > 1 else rng.choice((0, 1, 2**40, 2**62)) for step, count in zip(x.stride(), x.shape, strict=True)
    ]
    return torch.as_strided(x, x.shape, strides) if x.is_contiguous() and x.numel() else x


def lazily_negative(x: Tensor, rng: random.Random) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        return x
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def misaligned(x: Tensor, rng: random.Random) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64) or not x.numel():
        return x
    memory = bytearray(x.numel() * x.element_size() + 1)
    view = torch.frombuffer(memory, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape)
    return view.copy_(x.detach())


def with_history(x: Tensor, rng: random.Random) -> Tensor:
    return x * 1 if x.requires_grad else x.detach().clone().requires_grad_(x.is_floating_point())


SAME_NUMBERS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    transposed,
    within_more,
    every_other,
    flipped_twice,
    far_strides,
    lazily_negative,
    misaligned,
    with_history,
)


# Other numbers, sizes or things ---------------------------------------------------------------------------------------


def other_dtype(x: Tensor, rng: random.Random) -> Tensor:
    return x.detach().to(rng.choice(OTHER_DTYPES))


def other_size(x: Tensor, rng: random.Random) -> Tensor:
    if not x.dim():
        return x[None]
    dim, size = rng.randrange(x.dim()), rng.choice((0, 1, 2, 3, 7, 65))
    return x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])


def other_rank(x: Tensor, rng: random.Random) -> Tensor:
    return rng.choice((x[None], x.flatten(), x[..., None], x.sum(), x.flatten()[:0]))


def expanded(x: Tensor, rng: random.Random) -> Tensor:
    """One number wherever a dimension was."""
    dim = rng.randrange(x.dim()) if x.dim() else 0
    return x.narrow(dim, 0, 1).expand(x.shape) if x.numel() and x.dim() else x


def elsewhere(x: Tensor, rng: random.Random) -> Tensor:
    return x.to("meta")


def sparse(x: Tensor, rng: random.Random) -> Tensor:
    return x.detach().to_sparse() if x.dtype in DTYPES else x


def nested(x: Tensor, rng: random.Random) -> Tensor:
    return torch.nested.as_nested_tensor([x.detach().float(), x.detach().float()])


def quantised(x: Tensor, rng: random.Random) -> Tensor:
    return torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.quint8)


def no_tensor(x: Tensor, rng: random.Random) -> Any:
    flat = x.detach().flatten().float().tolist()
    return rng.choice((None, flat, "tensor", 3, 2.5, True, (), {}, object(), torch.float32, [x]))


def an_array(x: Tensor, rng: random.Random) -> Any:
    return x.detach().float().numpy()


WRONG: tuple[Callable[[Tensor, random.Random], Any], ...] = (
    other_dtype,
    other_size,
    other_rank,
    expanded,
    elsewhere,
    sparse,
    nested,
    quantised,
    no_tensor,
    an_array,
)


def mutate(x: Any, rng: random.Random) -> tuple[Any, str]:
    """Another tensor or thing in the place of a tensor, and what was done to it."""
    if (
        not isinstance(x, Tensor)
        or x.is_nested
        or x.layout != torch.strided
        or x.device.type != "cpu"
        or x.is_quantized
    ):
        return x, "as it was"
    change = rng.choice((*SAME_NUMBERS, *SAME_NUMBERS, *WRONG, other_dtype, other_size, other_dtype))
    try:
        return change(x, rng), change.__name__
    except (RuntimeError, TypeError, NotImplementedError):  # torch cannot make such a tensor of this one
        return x, "as it was"


OPTIONS = (
    None,
    -1,
    0,
    1,
    2,
    3,
    7,
    64,
    2**31,
    2**40,
    2**63,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "x",
    [],
    (1, 2),
    True,
    b"",
)


def odd_option(rng: random.Random) -> Any:
    return rng.choice(OPTIONS)


def shown(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)[:60]
    if x.is_nested:
        return "nested"
    return f"{x.dtype} {tuple(x.shape)}" + (f" {x.stride()}" if x.layout == torch.strided else "")


class Dice:
    """What one seed and number throw, and the story of it."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.generator = torch.Generator().manual_seed(self.rng.randrange(2**32))
        self.story: list[str] = []

    def say(self, *words: object) -> None:
        self.story.append(" ".join(map(str, words)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def spoil(self, tensors: dict[str, Any], at_most: int = 3) -> dict[str, Any]:
        """Some of them changed."""
        tensors = dict(tensors)
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, at_most))):
            name = self.rng.choice([*tensors])
            before = torch.ones(2, 5, dtype=torch.bool) if tensors[name] is None and "mask" in name else tensors[name]
            tensors[name], how = mutate(before, self.rng)
            self.say(f"{name}: {how} {shown(tensors[name])}")
        return tensors

    def spoil_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            name = self.rng.choice([*options])
            options = options | {name: odd_option(self.rng)}
            self.say(f"{name} = {options[name]!r}")
        return options
