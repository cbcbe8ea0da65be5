"""The patterns of the Sparse Transformer: the contract, the paper's sets drawn one by one, cost and memory."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subquad import Mechanism, SoftmaxAttention, StridedAttention, errors, state_bytes
from subquad.functional import strided_attention
from subquad.kernels.sparse import lines
from subquad.kernels.sparse import torch as sparse
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract

D = 6


@parametrize_contract(
    {
        "strided": lambda: StridedAttention(D, 5),
        "strided-every-token": lambda: StridedAttention(D, 1),
        "strided-one-tile": lambda: StridedAttention(D, 8, scale=0.7),
        "strided-all-near": lambda: StridedAttention(D, 200),
        "fixed": lambda: StridedAttention(D, 5, pattern="fixed", summary=2),
        "fixed-every-token": lambda: StridedAttention(D, 1, pattern="fixed"),
        "fixed-all-summaries": lambda: StridedAttention(D, 7, pattern="fixed"),
        "fixed-all-near": lambda: StridedAttention(D, 200, pattern="fixed"),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


# The definition -------------------------------------------------------------------------------------------------------


def papers_set(i: int, stride: int, summary: int | None) -> set[int]:
    """A_i of section 4.3 of the paper, both heads' sets together, token by token; positions count from 0."""
    if summary is None:
        near = {j for j in range(i + 1) if j >= max(0, i - stride + 1)}
        return near | {j for j in range(i + 1) if (i - j) % stride == 0}
    near = {j for j in range(i + 1) if j // stride == i // stride}
    return near | {j for j in range(i + 1) if j % stride in range(stride - summary, stride)}


@pytest.mark.parametrize(("stride", "summary"), [(4, None), (7, None), (1, None), (4, 1), (7, 3), (3, 3)])
def test_a_query_sees_the_papers_set(stride: int, summary: int | None) -> None:
    """Equal logits, and values that tell the keys apart: the output is the indicator of the set, over its size."""
    length = 23
    q = torch.zeros(1, 1, length, D, dtype=torch.float64)
    v = torch.eye(length, dtype=torch.float64)[None, None]
    pattern = "strided" if summary is None else "fixed"
    out = strided_attention(q, q, v, stride=stride, pattern=pattern, summary=summary, causal=True)[0, 0]
    both = strided_attention(q, q, v, stride=stride, pattern=pattern, summary=summary)[0, 0]
    for i in range(length):
        want = papers_set(i, stride, summary)
        assert set(out[i].nonzero().flatten().tolist()) == want
        assert torch.allclose(out[i][out[i] > 0], torch.tensor(1 / len(want), dtype=torch.float64))
        later = {j for j in range(i, length) if summary is None and i in papers_set(j, stride, None)}
        if summary is not None:  # the own block and the summaries of later ones
            later = {j for j in range(i, length) if j // stride == i // stride or j % stride >= stride - summary}
        assert set(both[i].nonzero().flatten().tolist()) == want | later


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_stride_as_long_as_the_sequence_is_softmax(pattern: str, causal: bool) -> None:
    inputs = make_inputs(SoftmaxAttention(D), 50)
    want = SoftmaxAttention(D)(*inputs, causal=causal)
    assert_close(StridedAttention(D, 50, pattern=pattern)(*inputs, causal=causal), want, 1e-12)


# The engine -----------------------------------------------------------------------------------------------------------

LONG = {
    "strided": StridedAttention(D, 20),
    "strided-long-windows": StridedAttention(D, 150),
    "fixed": StridedAttention(D, 20, pattern="fixed", summary=9),
    "fixed-long-blocks": StridedAttention(D, 150, pattern="fixed", summary=70),
}


@pytest.mark.parametrize("attention", LONG.values(), ids=LONG)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiny", [False, True])
def test_many_tiles(attention: Mechanism, causal: bool, tiny: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in a window, several blocks of summaries, several steps of the engine."""
    if tiny:
        monkeypatch.setattr(lines, "LARGEST", 7)
        monkeypatch.setattr(lines, "SMALLEST", 3)
        monkeypatch.setattr(sparse, "PAIRS_AT_ONCE", 1)
    inputs = make_inputs(attention, 401).leaves()
    mask = torch.rand(2, 401, generator=torch.Generator().manual_seed(1)) > 0.2
    for key_mask in (None, mask):
        got = attention(*inputs, causal=causal, key_mask=key_mask)
        want = attention.reference(*inputs, causal=causal, key_mask=key_mask)
        assert_close(got, want, 1e-12, "output")
        grads = (torch.autograd.grad(out.square().sum(), inputs, retain_graph=True) for out in (got, want))
        for g, w in zip(*grads, strict=True):
            assert_close(g, w, 1e-11, "gradient")


@pytest.mark.parametrize("attention", LONG.values(), ids=LONG)
def test_long_pieces(attention: Mechanism) -> None:
    """Pieces of many blocks each, on sequences that stand at different positions."""
    inputs = make_inputs(attention, 401)
    mask = torch.rand(2, 401, generator=torch.Generator().manual_seed(1)) > torch.tensor([[0.1], [0.6]])
    want = attention(*inputs, causal=True, key_mask=mask)
    for cuts in ((0, 170, 401), (0, 3, 4, 300, 301, 401)):
        state, outs = None, []
        for start, stop in pairwise(cuts):
            out, state = attention.extend(*inputs.tokens(start, stop), state, key_mask=mask[:, start:stop])
            outs.append(out)
        assert_close(torch.cat(outs, 2), want, 1e-12, f"cuts {cuts}")


def products(attention: Mechanism, length: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the engine, forward; torch counts none inside an operator."""
    monkeypatch.setattr(lines, "sparse_attention", lambda q, k, v, *rest: sparse.forward(sparse.Inputs(q, k, v), *rest))
    q = torch.randn(1, 1, length, attention.head_dim)
    with FlopCounterMode(display=False) as counter:
        attention(q, q, q, causal=causal)
    return counter.get_total_flops()


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("causal", [False, True])
def test_cost_grows_as_promised(pattern: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not far from the pairs that there are, so at most eight times for four times the length, twice the stride."""
    counts = []
    for stride in (32, 64):
        attention = StridedAttention(4, stride, pattern=pattern)
        counts.append(products(attention, stride**2, causal, monkeypatch))
        pairs = attention.attention_matrix(*torch.randn(2, 1, 1, stride**2, 4), causal=causal) != 0
        assert counts[-1] < 2.5 * (4 * 4 * int(pairs.sum()))
    assert counts[1] < 8.1 * counts[0]


def test_causal_tiles_skip_what_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long column costs half of all its pairs."""
    causal, both = (products(StridedAttention(4, 1), 2048, causal, monkeypatch) for causal in (True, False))
    assert 0 < causal < 0.6 * both


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_the_fixed_state_is_small(pattern: str) -> None:
    attention = StridedAttention(D, 20, pattern=pattern, summary=2 if pattern == "fixed" else None)
    inputs = make_inputs(attention, 401)
    sizes = []
    for length in (200, 400):
        _, state = attention.extend(*inputs.tokens(0, length))
        sizes.append(state_bytes(state))
    per_token = 2 * 2 * (D + 5) * 8  # sequences, key heads, keys and values, bytes
    assert sizes[1] - sizes[0] == per_token * (200 if pattern == "strided" else 10 * 2)


def test_decoding_thousands_of_tokens() -> None:
    for pattern in ("strided", "fixed"):
        attention = StridedAttention(16, 32, pattern=pattern)
        q, k, v = torch.randn(3, 1, 2, 1500, 16, generator=torch.Generator().manual_seed(0))
        want = attention(q, k, v, causal=True)
        with torch.no_grad():
            out, state = attention.extend(q[:, :, :50], k[:, :, :50], v[:, :, :50])
            outs = [out]
            for t in range(50, 1500):
                out, state = attention.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
                outs.append(out)
        assert_close(torch.cat(outs, 2), want, 1e-5, pattern)


# Errors ---------------------------------------------------------------------------------------------------------------

x = torch.randn(2, 4, 5, 8)
strided, fixed = StridedAttention(8, 3), StridedAttention(8, 3, pattern="fixed")


def cast(value: object) -> Any:
    return value


ERRORS: dict[str, tuple[Callable[[], object], type, str]] = {
    "stride": (
        lambda: StridedAttention(8, 0),
        errors.ConfigError,
        "strided: stride must be a whole number of at least 1, got 0",
    ),
    "pattern": (
        lambda: StridedAttention(8, pattern="fixd"),
        errors.ConfigError,
        "strided: pattern must be one of strided, fixed, got 'fixd' (did you mean 'fixed'?)",
    ),
    "summary of the other pattern": (
        lambda: StridedAttention(8, summary=3),
        errors.ConfigError,
        "strided: summary belongs to pattern='fixed', got pattern='strided'; leave it out",
    ),
    "summary beyond the stride": (
        lambda: strided_attention(x, x, x, stride=4, pattern="fixed", summary=5),
        errors.ConfigError,
        "strided: summary must be at most the stride of 4, got 5",
    ),
    "no summary": (
        lambda: StridedAttention(8, pattern="fixed", summary=0),
        errors.ConfigError,
        "strided: summary must be a whole number of at least 1, got 0",
    ),
    "scale": (
        lambda: StridedAttention(8, scale=-1.0),
        errors.ConfigError,
        "strided: scale must be a positive finite number, got -1.0",
    ),
    "causal": (
        lambda: strided_attention(x, x, x, causal=cast("yes")),
        errors.ConfigError,
        "strided: causal must be True or False, got 'yes'",
    ),
    "cross-attention": (
        lambda: strided_attention(x[:, :, :3], x, x),
        errors.ShapeError,
        "strided: compares positions, so it needs as many queries as keys, got 3 and 5",
    ),
    "mask": (
        lambda: strided_attention(x, x, x, key_mask=torch.ones(2, 4, dtype=torch.bool)),
        errors.MaskError,
        "strided: key_mask must be [batch, keys] = [2, 5], got [2, 4]",
    ),
    "the other pattern's state": (
        lambda: fixed.extend(x, x, x, strided.extend(x, x, x)[1]),
        errors.ShapeError,
        "strided: state must be a FixedState returned by extend, got StridedState",
    ),
    "another stride's state": (
        lambda: StridedAttention(8, 4, pattern="fixed", summary=3).extend(x, x, x, fixed.extend(x, x, x)[1]),
        errors.ShapeError,
        "strided: state.block_k must be [2, 4, 4, 8] for these inputs, got [2, 4, 3, 8]; "
        "it comes from another batch or mechanism",
    ),
    "transforms": (
        lambda: torch.func.grad(lambda q: strided(q, x, x).sum())(x),
        errors.BackendError,
        "subquad: torch.func transforms (vmap, grad, jvp) and forward-mode derivatives are not supported by the "
        "fast engine; fold a mapped dimension into the batch, use torch.autograd.grad, or mechanism.reference(...)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], object], kind: type, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_masked_tokens_are_nobody() -> None:
    """Whatever stands in padding, also in queries: no NaN passes, no gradient goes there."""
    for attention in (strided, fixed):
        mask = torch.tensor([[True, False, True, True, False]] * 2)
        q = x.masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_()
        out = attention(q, q, q, key_mask=mask)
        assert not bool(out[:, :, ~mask[0]].any())
        (gradient,) = torch.autograd.grad(out.square().sum(), q)
        assert bool(gradient.isfinite().all())
        assert not bool(gradient[:, :, ~mask[0]].any())


def brute_force(q: Tensor, stride: int) -> Tensor:
    """One token's causal attention at a time."""
    outs = []
    for i in range(q.shape[0]):
        seen = sorted(papers_set(i, stride, None))
        outs.append((q[i] @ q[seen].T * q.shape[1] ** -0.5).softmax(-1) @ q[seen])
    return torch.stack(outs)


def test_against_one_token_at_a_time() -> None:
    q = torch.randn(300, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = strided_attention(*[q[None, None]] * 3, stride=17, causal=True)[0, 0]
    assert_close(got, brute_force(q, 17), 1e-12)
