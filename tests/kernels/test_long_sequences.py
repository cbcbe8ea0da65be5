"""What sums over many tokens lose: nothing that counts, at once or token by token, on both engines."""

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.kernels import problem
from subquad.kernels.centre import Rows, is_due, pieces
from subquad.kernels.cpu import library
from subquad.testing import assert_close
from threads import threads

NATIVE = [] if library.AVAILABLE else pytest.mark.skip(library.WHY_MISSING)
BACKENDS = ["torch", pytest.param("cpu", marks=NATIVE)]
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


def gradients(attention: Mechanism, inputs: list[Tensor], grad: Tensor, causal: bool = True) -> list[Tensor]:
    """Of q, k and v."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    return list(torch.autograd.grad(attention(*inputs, causal=causal), inputs, grad))


@functools.cache
def gradients_in_float64(name: str, length: int, causal: bool) -> list[Tensor]:
    inputs, (grad, *_) = ([t.double() for t in draw(length, seed)] for seed in (0, 1))
    return gradients(MECHANISMS[name](backend="torch"), inputs, grad, causal)


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_computed() -> Iterator[None]:
    yield
    outputs_in_float64.cache_clear()
    gradients_in_float64.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("length", [131_072, pytest.param(MILLION, marks=pytest.mark.full)])
def test_outputs(name: str, length: int, backend: str) -> None:
    out = MECHANISMS[name](backend=backend)(*draw(length), causal=True)
    assert float(block_errors(out, outputs_in_float64(name, length)).max()) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("length", [65_536, pytest.param(MILLION, marks=pytest.mark.full)])
def test_gradients(name: str, length: int, causal: bool, backend: str) -> None:
    """A query's is a small difference of large sums, unless those are kept about the mean of the values."""
    (grad, *_), want = draw(length, 1), gradients_in_float64(name, length, causal)
    got = gradients(MECHANISMS[name](backend=backend), draw(length), grad, causal)
    for of, g, w in zip("qkv", got, want, strict=True):
        assert float(block_errors(g, w).max()) <= 1e-5, f"d{of}"


@pytest.mark.parametrize(("backend", "left"), [("torch", 0.3), pytest.param("cpu", 0.1, marks=NATIVE)])
def test_gradients_that_cancel(backend: str, left: float) -> None:
    """What the second half of the queries says to the keys nearly undoes what the first half says. Both engines add up
    a block at a time, but that of C++ has the smaller blocks."""
    length, (q, k, v), (grad, *_) = 131_072, draw(131_072), draw(131_072, 1)
    q[:, :, length // 2 :] = q[:, :, : length // 2]
    grad[:, :, length // 2 :] = left * grad[:, :, length // 2 :] - grad[:, :, : length // 2]
    attention = MECHANISMS["favor, near=0"]
    want = gradients(attention(backend="torch"), [t.double() for t in (q, k, v)], grad.double(), causal=False)
    got = gradients(attention(backend=backend), [q, k, v], grad, causal=False)
    for of, g, w in zip("qkv", got, want, strict=True):
        assert float(block_errors(g, w).max()) <= 1e-5, f"d{of}"


# The far field is kept about a centre ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_however_the_work_is_cut(
    name: str, backend: str, heads: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of features, stretches of tokens, portions of heads: all move centres, and keep what rounding left out."""
    monkeypatch.setattr(problem, "LOW_FROM", 1000)
    q, k, v = (t.unflatten(2, (heads, -1))[:, 0] for t in draw(heads * 5000))
    grad = draw(heads * 5000, 1)[0].unflatten(2, (heads, -1))[:, 0]
    want = gradients(MECHANISMS[name](backend="torch"), [t.double() for t in (q, k, v)], grad.double())
    with threads(workers):
        got = gradients(MECHANISMS[name](backend=backend), [q, k, v], grad)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_merged_twice(backend: str) -> None:
    """Slices of features and two sweeps meet in one row; what is kept for the backward still knows more digits."""
    saved, (q, k, v) = [], draw(131_072)
    want = MECHANISMS["favor"](backend="torch")(q.double(), k.double(), v.double())

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with threads(2), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = MECHANISMS["favor"](backend=backend)(q.requires_grad_(), k, v).detach()
    low = Rows.unpacked(out, next(tensor for tensor in saved if tensor.dtype == torch.int8)).low
    error, rounding = (float(block_errors(x, want).max()) for x in (out.double() + low, out))
    assert error <= rounding / 4


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "attention",
    [
        functools.partial(FavorAttention, 4, 8, near=16, sinks=3),
        functools.partial(FavorAttention, 4, 8, near=0, sinks=2, kernel="gaussian"),
        functools.partial(FavorAttention, 4, 8, near=16, estimator="exponential"),
        functools.partial(LinearAttention, 4, feature_map="softplus"),
        functools.partial(LinearAttention, 4, feature_map="relu", num_features=8),
    ],
    ids=["favor", "gaussian", "learned", "softplus", "projected"],
)
def test_the_definition(attention: Callable[..., Mechanism], backend: str, causal: bool) -> None:
    """Where centres are chosen: padding in between, two queries to a key head, values wider than keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 800, dim, generator=generator) for heads, dim in ((4, 4), (2, 4), (2, 6)))
    mask = torch.rand(2, 800, generator=generator) < 0.9
    mask[1, :300] = False
    mechanism, grad = attention(backend=backend), torch.randn(2, 4, 800, 6, generator=generator)
    inputs, exact = ([t.to(dtype).requires_grad_() for t in (q, k, v + 1)] for dtype in (torch.float32, torch.float64))
    out = mechanism(*inputs, causal=causal, key_mask=mask)
    want = attention(backend="torch").double().reference(*exact, causal=causal, key_mask=mask)
    assert_close(out, want, 1e-5)
    got_gradients, gradients = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, exact, grad.double())
    for of, g, w in zip("qkv", got_gradients, gradients, strict=True):
        assert_close(g, w, 1e-5, f"d{of}")


@pytest.mark.parametrize("huge", [1e4, 1e17, 1e30])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_centre_knows_later_values(name: str, backend: str, workers: int, huge: float) -> None:
    """Earlier rows, and the gradients of their queries, are the same to the bit."""
    attention, (q, k, v), (grad, *_) = MECHANISMS[name](backend=backend), draw(4096), draw(4096, 1)
    with threads(workers):
        for changed in (700, 2049, 3000):
            other = v.clone()
            other[:, :, changed:] = huge
            results = []
            for values in (v, other):
                query = q.clone().requires_grad_()
                rows = attention(query, k, values, causal=True)[:, :, :changed]
                (dq,) = torch.autograd.grad(rows, query, grad[:, :, :changed])
                results.append((rows.detach(), dq[:, :, :changed]))
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), f"token {changed}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_values_of_any_size(name: str, backend: str) -> None:
    """A centre may be large, infinite squares are none, and values that change theirs take it with them."""
    q, k, v = draw(4096)
    for scale, shift in ((1e30, 0), (1e-30, 0), (1, 1e6), (1, -1e30)):
        values = (v + shift) * scale
        values[:, :, 2000:] *= -1
        want = MECHANISMS[name](backend="torch")(q.double(), k.double(), values.double(), causal=True)
        assert_close(MECHANISMS[name](backend=backend)(q, k, values, causal=True), want, 1e-5, f"{scale} {shift}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_hardly_see_the_far_field(backend: str) -> None:
    """Its centre is large, and none of what they are."""
    towards = torch.full((1, 1, 2112, 8), 2.0)
    keys = towards.clone()
    keys[:, :, :2048] *= -1
    values = draw(2112)[2]
    values[:, :, :2048] += 1e4
    attention = FavorAttention(8, 64, backend=backend)
    want = attention.reference(*(t.double() for t in (towards, keys, values)), causal=True)
    assert_close(attention(towards, keys, values, causal=True)[:, :, 2048:], want[:, :, 2048:], 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_states_have_no_centre(name: str, backend: str) -> None:
    """What is handed on, and its gradient, are of the values themselves: two parts are as good as the whole."""
    attention, inputs, (grad, *_) = MECHANISMS[name](backend=backend), draw(3000), draw(3000, 1)
    want = [MECHANISMS[name](backend="torch")(*(t.double() for t in inputs), causal=True)]
    want += gradients(MECHANISMS[name](backend="torch"), [t.double() for t in inputs], grad.double())
    inputs = [t.requires_grad_() for t in inputs]
    out, state = attention.extend(*(t[:, :, :2000] for t in inputs))
    more, _ = attention.extend(*(t[:, :, 2000:] for t in inputs), state)
    out = torch.cat([out, more], 2)
    for got, w in zip((out, *torch.autograd.grad(out, inputs, grad)), want, strict=True):
        assert_close(got, w, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_rows_that_see_nothing_are_zero(name: str, backend: str, causal: bool) -> None:
    """Not the centre."""
    inputs = draw(2048)
    mask = torch.ones(1, 2048, dtype=torch.bool)
    mask[:, :1500] = False
    attention = MECHANISMS[name](backend=backend)
    out = attention(*inputs, causal=causal, key_mask=mask)
    want = attention.reference(*(t.double() for t in inputs), causal=causal, key_mask=mask)
    assert_close(out, want, 1e-5)
    assert torch.equal(out[want == 0], torch.zeros(int((want == 0).sum())))


@pytest.mark.parametrize(
    ("before", "now", "due"),
    [
        (0, 0, False),
        (0, 511, False),
        (0, 512, True),
        (512, 600, False),
        (512, 640, True),
        (640, 1000, True),
        (1024, 1279, False),
        (1024, 1280, True),
        (1 << 20, (1 << 20) + 65_536, False),
        (1 << 20, 5 << 18, True),
    ],
)
def test_centres_are_chosen_ever_more_rarely(before: int, now: int, due: bool) -> None:
    """Four times while the number of tokens doubles."""
    assert is_due(before, now) is due


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("length", "tile", "block"), [(1, 64, 64), (5000, 4096, 64), (9999, 2048, 64), (700, 4096, 48)]
)
def test_pieces_are_all_tokens_in_the_order_of_the_sweep(length: int, tile: int, block: int, reverse: bool) -> None:
    tiles = pieces(length, tile, block, reverse)
    in_order = list(chain.from_iterable(tiles))[:: -1 if reverse else 1]
    assert len(tiles) == -(-length // tile)
    assert list(chain.from_iterable(range(p.start, p.stop) for p in in_order)) == list(range(length))
    assert all(p.start % block == 0 for p in in_order)


def test_what_rounding_left_out_is_kept_in_eight_bits() -> None:
    exact = torch.randn(100, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = Rows(exact.float(), (exact - exact.float()).float())
    unpacked = Rows.unpacked(rows.out, rows.packed_low())
    step = exact.abs().amax(-1, keepdim=True) * 2**-23 / 127
    assert bool(((unpacked.out.double() + unpacked.low.double() - exact).abs() <= 1.01 * step).all())


# Decoding -------------------------------------------------------------------------------------------------------------


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
