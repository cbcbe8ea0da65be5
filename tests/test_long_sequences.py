"""What sums over many tokens lose: nothing that counts, at once or token by token, on both engines."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.kernels.cpu import library

BACKENDS = ["torch", pytest.param("cpu", marks=[] if library.AVAILABLE else pytest.mark.skip(library.PROBLEM))]
MECHANISMS = {
    "favor": functools.partial(FavorAttention, 8, 64),
    "favor, near=0": functools.partial(FavorAttention, 8, 64, near=0, sinks=0),
    "linear": functools.partial(LinearAttention, 8),
}
MILLION = 1_048_576


def draw(length: int, seed: int = 0) -> list[Tensor]:
    """Values have a mean: sums of them grow with the length."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, length, 8, generator=generator)
    return [q, k, v + 1]


def block_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative norms of the errors of every 1,024 rows."""
    difference, size = ((x.double().unflatten(2, (-1, 1024)).flatten(3).norm(dim=-1)) for x in (got - want, want))
    return difference / size


@functools.cache
def outputs_in_float64(name: str, length: int) -> Tensor:
    return MECHANISMS[name](backend="torch")(*(t.double() for t in draw(length)), causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("length", [131_072, pytest.param(MILLION, marks=pytest.mark.full)])
def test_outputs(name: str, length: int, backend: str) -> None:
    out = MECHANISMS[name](backend=backend)(*draw(length), causal=True)
    assert float(block_errors(out, outputs_in_float64(name, length)).max()) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "attention",
    [
        lambda backend: LinearAttention(4, feature_map="relu", backend=backend),
        lambda backend: LinearAttention(4, feature_map="exp", backend=backend),
        lambda backend: FavorAttention(4, 8, near=0, sinks=0, backend=backend),
        lambda backend: FavorAttention(4, 8, near=4, sinks=0, backend=backend),
    ],
    ids=["linear", "exp", "favor, near=0", "favor"],
)
def test_a_large_state_still_grows(attention: Callable[[str], Mechanism], backend: str) -> None:
    """After 2^25 tokens one more is less than the last digit of the sum: plain float32 would never grow again."""
    mechanism: Mechanism = attention(backend)
    token, several = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 8, 4)
    with torch.no_grad():
        state: Any = mechanism.extend(several, several, several)[1]
        start = state._replace(far_sum=state.far_sum * 2**22, far_low=torch.zeros_like(state.far_sum))
        weight = (state.far_sum / state.far_sum[..., -1:].amax()).double()  # of one token among 2^25
        later: Any = start
        for _ in range(400):
            later = mechanism.extend(token, token, token, later)[1]
    before, after = (s.far_sum.double() + s.far_low.double() for s in (start, later))
    share = ((after - before) / before.where(weight > 0, torch.inf)).max()
    steps, seen = (400, 4) if mechanism.positional else (400, 8)  # one of two blocks was folded when it began
    assert abs(float(share) * seen * 2**22 / steps - 1) < 0.02, "tokens are lost"


@pytest.mark.full
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_million_steps(name: str) -> None:
    """Decoding is as good as the whole at once."""
    mechanism = MECHANISMS[name](backend="auto")
    q, k, v = draw(MILLION)
    out, state = torch.empty(1, 1, MILLION, 8), None
    with torch.no_grad():
        for t in range(MILLION):
            out[:, :, t : t + 1], state = mechanism.extend(
                q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state
            )
    assert float(block_errors(out, outputs_in_float64(name, MILLION)).max()) <= 1e-5
