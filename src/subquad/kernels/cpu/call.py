"""Calls of the C++ engine: one attention problem as it wants it, and the tensors that it fills."""

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.checks import engine as checks
from subquad.kernels.centre import LOW
from subquad.kernels.cpu import gate, library
from subquad.kernels.cpu.gate import TILE, Plan, StepPlan
from subquad.kernels.cpu.library import DTYPES, Backward, Forward, Library, Problem
from subquad.kernels.favor.inputs import FavorInputs
from subquad.kernels.linear.inputs import LinearInputs
from subquad.kernels.problem import Gradients, Outputs, Saved, keeps_low

RULES = ("none", "norm", "groups")
KINDS = ("exp", "elu1", "relu", "softplus", "relu2", "identity")
SMALLEST_SLICE = 16  # features: fewer would leave vectors half empty


def engine() -> Library:
    if not isinstance(library.LOADED, Library):
        raise checks.no_engine(library.LOADED)
    return library.LOADED


def block_size(near: int, chunk: int, length: int) -> int:
    """Tokens per block. A near block longer than the sequence is the sequence."""
    return min(near, max(length, 1)) if near else min(chunk or TILE, TILE)


def blocks_of_tile(near: int, chunk: int, length: int) -> int:
    """Tokens of a block with several near blocks: as many as a tile takes, and the sequence has."""
    near = min(near, max(length, 1))
    fitting, there = max(1, min(chunk or TILE, TILE) // near), -(-length // near)
    return min(fitting, there) * near


def blocks_per_segment(block: int, num_features: int) -> int:
    """A state is kept every so many blocks: a state is M x V numbers, so that 4 M tokens apart they are fewer than the
    values. The backward keeps a state per block of a segment, hence not too many."""
    return min(64, max(1, 4 * num_features // block))


def border_count(length: int, block: int, num_features: int) -> int:
    return -(-length // (block * blocks_per_segment(block, num_features)))


def parts_per_head(heads: int) -> int:
    """Parts that heads are cut into, so that every thread has as much to do as the others."""
    threads = torch.get_num_threads()
    return 1 if heads >= 4 * threads else threads // math.gcd(heads, threads)


def make_plan(q: Tensor, k: Tensor, v: Tensor, **others: int) -> Plan:
    """The numbers that the inputs tell, and `others`."""
    return gate.plan(**_numbers(dtype_number(q), q.shape, k.shape, v.shape[3], torch.get_num_threads()) | others)


def step_plan(
    dtype: torch.dtype, shapes: tuple[torch.Size, torch.Size, torch.Size], root: float, **others: int
) -> StepPlan:
    """Of one token for every sequence. shapes: of q, k and v."""
    q, k, v = shapes
    if not (len(q) == len(k) == len(v) == 4 and q[2] == k[2] == v[2] == 1 and k[1]) or dtype not in DTYPES:
        raise checks.not_one_token(gate.OP, dtype, shapes)
    return StepPlan(root, **_numbers(DTYPES[dtype], q, k, v[3], torch.get_num_threads()) | others)


def _numbers(dtype: int, q_shape: torch.Size, k_shape: torch.Size, value_dim: int, threads: int) -> dict[str, int]:
    """What the inputs tell, and for the rest what is most usual."""
    return {
        "dtype": dtype,
        "rule": 0,
        "rule_groups": 1,
        "batch": q_shape[0],
        "key_heads": k_shape[1],
        "groups": q_shape[1] // k_shape[1],
        "map_heads": 1,
        "head_dim": q_shape[3],
        "value_dim": value_dim,
        "sinks": 0,
        "causal": 0,
        "gaussian": 0,
        "near_blocks": 0,
        "mask_batch": 1,
        "blocks_per_segment": 1,
        "threads": threads,
        "slices": 1,
        "stretches": 1,
        "tile": TILE,
        "near": 1,
        "reach": 1,
        "far": 1,
        "block": 1,
        "length": q_shape[2],
        "key_length": k_shape[2],
    }


def dtype_number(q: Tensor) -> int:
    if q.dtype not in DTYPES:
        raise checks.wrong_dtype(gate.OP, "q", q, list(DTYPES))
    return DTYPES[q.dtype]


def dense_rows(tensor: Tensor) -> Tensor:
    """With neighbouring numbers side by side in the last dimension; any other strides will do."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    once = tensor[tuple(slice(None if step else 1) for step in tensor.stride()[:-1])]  # the gradient of a sum: one row
    return once.contiguous().expand(tensor.shape)


def float32(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor if tensor.dtype is torch.float32 else tensor.to(torch.float32)).contiguous()


def mask(tensor: Tensor | None, batch: int) -> Tensor | None:
    """One row for all sequences, or one for each."""
    if tensor is None:
        return None
    return tensor.expand(batch if batch > 1 else tensor.shape[0], -1).contiguous()


def run_forward(plan: Plan, given: Problem, q: Tensor, borders: int) -> Outputs:
    """borders: how many states are kept for the backward."""
    logarithmic, state = given.kind == KINDS.index("exp"), bool(given.causal and given.far)
    features, values = given.num_features, given.value_dim + 1
    heads, rows = (given.batch, given.key_heads), q.shape[:3]

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    def maxima(*shape: int) -> Tensor:
        """Those of linear attention are all zero, and C++ does not write them."""
        return new(*shape, features) if logarithmic else new(*shape, 1).zero_()

    out = new(*rows, given.value_dim)
    made = Outputs(
        out,
        normaliser=new(*rows, 2) if logarithmic else new(*rows),
        low=torch.empty(out.shape if keeps_low(q, borders > 0) else 0, dtype=LOW, device="cpu"),
        borders_max=maxima(borders, *heads),
        borders_sum=new(borders, *heads, features + 1, values),
        far_max=maxima(*heads) if state else new(0),
        far_sum=new(*heads, features, values) if state else new(0),
    )
    filled = plan.fill(Forward(), **{name: t if t.numel() else None for name, t in made._asdict().items()})
    engine().forward(ctypes.byref(given), ctypes.byref(filled))
    return made._replace(out=out.to(q.dtype))


def run_backward(
    plan: Plan, given: Problem, inputs: FavorInputs | LinearInputs, saved: Saved, added: Gradients
) -> Gradients:
    """Of q, k and v in float32, of the first state if there is one, and `added`, to be filled: of sinks and map."""
    made = {name: torch.empty(getattr(inputs, name).shape, dtype=torch.float32, device="cpu") for name in "qkv"}
    if inputs.far_sum is not None:
        made["far_sum"] = torch.empty(inputs.far_sum.shape, dtype=torch.float32, device="cpu")
    filled = plan.fill(
        Backward(),
        grad_out=dense_rows(saved.grad_out),
        out=dense_rows(saved.out),
        normaliser=float32(saved.normaliser),
        low=saved.low,
        borders_max=float32(saved.borders_max) if given.far else None,
        borders_sum=float32(saved.borders_sum) if given.far else None,
        grad_last_far_sum=float32(saved.grad_far_sum),
        **{f"d{name}": grad if grad.numel() else None for name, grad in (made | added).items()},
    )
    engine().backward(ctypes.byref(given), ctypes.byref(filled))
    return made | added


def run_step(
    plan: StepPlan, given: Problem, read: list[Any], kept: Sequence[Tensor], changed: Iterable[int]
) -> tuple[Tensor, list[Tensor]]:
    """One token for every sequence: the output in float32, and `kept` with new tensors at the places `changed`.

    given, read: what the gate made of the inputs and of the state.
    """
    step, out, new = plan.new_step(read, kept, changed)
    engine().step(ctypes.byref(given), ctypes.byref(step))
    return out, new
