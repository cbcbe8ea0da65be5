"""Pages: what a query sees, drawn pair by pair; needles, ties and borders; decoding; cost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import PagesAttention, SoftmaxAttention, WindowAttention, errors, reorder_state, state_bytes
from subquad.functional import pages_attention
from subquad.kernels.sparse import choice, choice_native, choice_operator
from subquad.mechanisms.pages_state import PagesState
from subquad.models import SubquadConfig, SubquadForMaskedLM, SubquadForSequenceClassification
from subquad.nn import MultiheadAttention
from subquad.testing import assert_close, make_inputs
from subquad.testing.inputs import Inputs, gradients
from subquad.testing.judging import extend_in_pieces

D = 6
DEFAULTS: dict[str, Any] = {"pages": 2, "page": 4, "window": 8, "sinks": 3}


def make(**options: Any) -> PagesAttention:
    return PagesAttention(D, **{**DEFAULTS, **options})


# The definition -------------------------------------------------------------------------------------------------------


def seen(q: Tensor, k: Tensor, i: int, *, pages: int, page: int, window: int, sinks: int) -> set[int]:
    """Keys `[T, D]` that query i of q `[T, D]` sees, by the words of the definition."""

    def number(token: int) -> int:
        return (token - sinks) // page

    def bound(p: int) -> float:
        first = sinks + p * page
        keys = k[first : first + page].tolist()
        return sum(max(x * max(column), x * min(column)) for x, *column in zip(q[i].tolist(), *keys, strict=True))

    if i < sinks:
        return set(range(i + 1))
    candidates = range(max(0, number(i) - window // page))
    chosen = set(sorted(candidates, key=lambda p: (-bound(p), p))[:pages])
    return {
        j
        for j in range(i + 1)
        if j < sinks or number(i) - number(j) <= window // page or (j >= sinks and number(j) in chosen)
    }


OPTIONS = [
    DEFAULTS,
    {"pages": 1, "page": 1, "window": 0, "sinks": 0},
    {"pages": 3, "page": 3, "window": 3, "sinks": 5},
    {"pages": 0, "page": 4, "window": 4, "sinks": 1},
    {"pages": 2, "page": 2, "window": 10, "sinks": 2},
    {"pages": 5, "page": 16, "window": 16, "sinks": 40},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_query_sees_what_the_definition_says(options: dict[str, int], dtype: torch.dtype) -> None:
    """Each query head chooses for itself, where two of them share a key head too."""
    q, k, _ = make_inputs(make(), 70).to(dtype)
    v = torch.eye(70, dtype=dtype).expand(2, 2, -1, -1)
    out = PagesAttention(D, **options)(q, k, v, causal=True)
    for head in range(4):
        for i in range(70):
            want = seen(q[0, head], k[0, head // 2], i, **options)
            assert set(out[0, head, i].nonzero().flatten().tolist()) == want, f"head {head}, query {i}"


def test_heads_of_a_group_choose_for_themselves() -> None:
    """Two query heads that look for different pages of one key head find both."""
    length = 60
    k = torch.zeros(1, 1, length, D)
    k[0, 0, 9, 0], k[0, 0, 21, 1] = 50, 50
    q = torch.zeros(1, 2, length, D)
    q[0, 0, :, 0] = q[0, 1, :, 1] = 5
    v = torch.arange(length, dtype=torch.float32).view(1, 1, -1, 1)
    out = make(pages=1)(q, k, v, causal=True)
    assert_close(out[0, :, -1, 0], torch.tensor([9.0, 21.0]), 1e-6)


def test_a_needle_is_found() -> None:
    """A key far back that matches the query decides the output; without pages it is out of sight."""
    q, k, v = make_inputs(make(), 400, batch=1).to(torch.float32)
    q, k, v = (x.clone() for x in (q, k, v))
    k[:, :, 37] = 30 * q[:, ::2, 399] / q[:, ::2, 399].norm(dim=-1, keepdim=True)
    found, blind = (make(pages=pages)(q, k, v, causal=True)[:, ::2, 399] for pages in (2, 0))
    assert_close(found, v[:, :, 37], 1e-5)
    assert (blind - v[:, :, 37]).norm() > 0.5 * v[:, :, 37].norm()
    exact = SoftmaxAttention(D)(q, k, v, causal=True)[:, ::2, 399]
    assert_close(found, exact, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_equal_pages_the_earlier_is_chosen(dtype: torch.dtype) -> None:
    """Pages of the same keys have the same bound, whatever the numbers are."""
    generator = torch.Generator().manual_seed(0)
    body = torch.randn(2, 1, 4, D, generator=generator, dtype=dtype).repeat(1, 1, 40, 1)
    k = torch.cat([body[:, :, :3], body], 2)
    q = torch.randn(2, 3, 163, D, generator=generator, dtype=dtype)
    v = torch.eye(163, dtype=dtype).expand(2, 1, -1, -1)
    out = make(pages=3)(q, k, v, causal=True)
    steps, _ = extend_in_pieces(make(pages=3), Inputs(q, k, v), [1] * 163, None)
    for result in (out, steps):
        met = result[:, :, -1].nonzero()[:, 2].view(2, 3, -1)
        own = list(range(3 + 37 * 4, 163))
        assert met.tolist() == [[[*range(3 + 3 * 4), *own]] * 3] * 2


def test_borders_of_pages_and_window() -> None:
    """Sinks 3, page 4, window 8: a page leaves the window when a query begins the third page after it."""
    length = 3 + 5 * 4
    q = torch.zeros(1, 1, length, D, dtype=torch.float64)
    v = torch.eye(length, dtype=torch.float64)[None, None]
    out = make(pages=0)(q, q, v, causal=True)[0, 0]

    def met(i: int) -> list[int]:
        return out[i].nonzero().flatten().tolist()

    assert met(0) == [0]
    assert met(2) == [0, 1, 2]
    assert met(3) == [0, 1, 2, 3]
    assert met(14) == list(range(15))  # the last of page 2: pages 0, 1 and its own
    assert met(15) == [0, 1, 2, *range(7, 16)]  # the first of page 3
    assert met(22) == [0, 1, 2, *range(11, 23)]  # the last of page 4, which is full


def test_as_many_pages_as_there_are_is_exact_attention() -> None:
    inputs = make_inputs(make(), 65)
    want = SoftmaxAttention(D)(*inputs, causal=True)
    for options in ({"pages": 100}, {"window": 400}, {"page": 64, "window": 0}, {"sinks": 65}):
        assert_close(make(**options)(*inputs, causal=True), want, 1e-12, str(options))


def test_without_pages_it_is_a_window_of_whole_pages() -> None:
    """Of pages of one token: a window of the last tokens."""
    inputs = make_inputs(make(), 65)
    got = make(pages=0, page=1, window=9, sinks=2)(*inputs, causal=True)
    assert_close(got, WindowAttention(D, 10, global_tokens=2)(*inputs, causal=True), 1e-12)


# Earlier choices stay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_appended_changes_no_earlier_choice(dtype: torch.dtype) -> None:
    inputs = make_inputs(make(), 200).to(dtype)
    whole = make()(*inputs, causal=True)
    for length in (1, 3, 4, 15, 16, 57, 198, 199):
        part = make()(*inputs.tokens(0, length), causal=True)
        assert_close(part, whole[:, :, :length], 1e-12 if dtype == torch.float64 else 1e-6, f"{length} tokens")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [[1] * 150, [60, *[1] * 90], [7, 1, 40, 2, 1, 1, 98], [149, 1]], ids=len)
def test_decoding_in_pieces_with_padding(splits: list[int], dtype: torch.dtype) -> None:
    """Sequences of a batch at different places, in every precision: the same choices, so the same outputs."""
    inputs = make_inputs(make(), 150, batch=3).to(dtype)
    mask = torch.rand(3, 150, generator=torch.Generator().manual_seed(2)) > torch.tensor([[0.0], [0.3], [0.7]])
    want = make()(*inputs, causal=True, key_mask=mask)
    got, state = extend_in_pieces(make(), inputs, splits, mask)
    assert isinstance(state, PagesState)
    assert state.length.tolist() == mask.sum(-1).tolist()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    assert_close(got, want, tolerance)


def test_gradients_reach_queries_keys_and_values_of_chosen_pages() -> None:
    """In float32, forward and backward are the C++ engine's where there is one."""
    inputs = make_inputs(make(), 120).to(torch.float32)
    leaves, exact = inputs.leaves(), inputs.to(torch.float64).leaves()
    got = gradients(make()(*leaves, causal=True), leaves)
    want = gradients(make().reference(*exact, causal=True), exact)
    for name, g, w in zip("qkv", got, want, strict=True):
        assert_close(g, w, 1e-6, f"gradient of {name}")


# The state ------------------------------------------------------------------------------------------------------------


def test_pages_are_stored_once_in_a_window() -> None:
    """In between the states share them; extremes of stored pages are never made anew."""
    attention, (q, k, v) = make(), make_inputs(make(), 100, batch=1)
    _, state = attention.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    copies = 0
    for t in range(1, 100):
        before = state
        _, state = attention.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
        if state.page_k.data_ptr() != before.page_k.data_ptr():
            old = before.high.shape[2]
            assert torch.equal(state.high[:, :, :old], before.high)
            copies += 1
    assert copies == (100 - 3 - 1) // 12
    bounds = choice.extremes(k[:, :, 3:99].unflatten(2, (-1, 4)))
    assert torch.equal(state.high, bounds.high[:, :, : state.high.shape[2]])
    assert torch.equal(state.low, bounds.low[:, :, : state.low.shape[2]])


class Written(TorchDispatchMode):
    """Counts the numbers of all results that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func._schema.returns[0].alias_info is None:
            self.count += out.numel()
        return out


def test_a_step_costs_the_same_among_more_tokens() -> None:
    """Pages are read where they lie: what a step makes does not grow. (What looks through them is an operator.)"""
    counts = []
    for length in (600, 2400):
        q, k, v = make_inputs(make(), length + 2).to(torch.float32)
        _, state = make().extend(q[:, :, :length], k[:, :, :length], v[:, :, :length])
        with Written() as written:
            for t in (length, length + 1):
                _, state = make().extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
        counts.append(written.count)
    assert counts[0] == counts[1]


def test_reordered_states_of_different_lengths() -> None:
    inputs = make_inputs(make(), 90, batch=3)
    mask = torch.arange(80) < torch.tensor([[80], [41], [2]])
    _, state = make().extend(*inputs.tokens(0, 80), key_mask=mask)
    order = torch.tensor([1, 2, 1])
    out, _ = extend_after(reorder_state(state, order), [x[order] for x in inputs])
    want, _ = extend_after(state, list(inputs))
    assert_close(out, want[order], 1e-12)
    assert state_bytes(reorder_state(state, order)) == state_bytes(state)


def extend_after(state: Any, inputs: list[Tensor]) -> tuple[Tensor, Any]:
    outs = []
    for t in range(80, 90):
        q, k, v = (x[:, :, t : t + 1] for x in inputs)
        out, state = make().extend(q, k, v, state)
        outs.append(out)
    return torch.cat(outs, 2), state


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_bounds_are_upper_bounds() -> None:
    """Of two pages the one is chosen whose bound is larger, and no product in a page is above its bound."""
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(1, 2, *shape, D, generator=generator) for shape in ((9, 4), (3, 11)))
    found = choice.extremes(k)
    bounds = torch.maximum(
        q[..., None, :] * found.high[:, :, None, None], q[..., None, :] * found.low[:, :, None, None]
    )
    products = torch.einsum("bkgtd,bkped->bkgtpe", q, k)
    assert bool((products.amax(-1) <= bounds.sum(-1) + 1e-5).all())
    chosen = choice_operator.choose(q, found, torch.full((1, 11), 9), 2)
    assert torch.equal(chosen.sort(-1).values, bounds.double().sum(-1).topk(2).indices.sort(-1).values)


def test_a_choice_has_no_gradient() -> None:
    q, k, _ = make_inputs(make(), 40).leaves()
    found = choice.extremes(k[:, :, :36].unflatten(2, (9, 4)))
    chosen = choice_operator.choose(q.unflatten(1, (2, 2)), found, torch.full((1, 40), 9), 2)
    assert not found.high.requires_grad
    assert not chosen.requires_grad


# Errors ---------------------------------------------------------------------------------------------------------------

x = torch.randn(1, 2, 10, D)
ONLY_CAUSAL = "can only be causal, a query chooses pages that are full before it; use"

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "bidirectional": (lambda: make()(x, x, x), f"pages: {ONLY_CAUSAL} causal=True"),
    "bidirectional function": (lambda: pages_attention(x, x, x), f"pages: {ONLY_CAUSAL} causal=True"),
    "bidirectional matrix": (lambda: make().attention_matrix(x, x), f"pages: {ONLY_CAUSAL} causal=True"),
    "causal": (lambda: pages_attention(x, x, x, causal=None), "pages: causal must be True or False, got None"),  # pyright: ignore
    "a layer": (
        lambda: MultiheadAttention(12, 2, attention="pages")(*[torch.randn(5, 1, 12)] * 3),
        f"pages: {ONLY_CAUSAL} causal=True",
    ),
    "a masked model": (
        lambda: SubquadForMaskedLM(SubquadConfig(vocab_size=9, attention="pages")),
        f"SubquadForMaskedLM: pages {ONLY_CAUSAL} SubquadForCausalLM (objective='causal') or another attention",
    ),
    "a classifier": (
        lambda: SubquadForSequenceClassification(
            SubquadConfig(vocab_size=9, attention=["favor", "pages"], num_hidden_layers=2)
        ),
        f"SubquadForSequenceClassification: pages {ONLY_CAUSAL} causal=True in the config or another attention",
    ),
    "window": (lambda: make(window=10), "pages: window must be a multiple of the page of 4 tokens, got 10"),
    "negative window": (lambda: make(window=-4), "pages: window must be a whole number of at least 0, got -4"),
    "page": (lambda: make(page=0), "pages: page must be a whole number of at least 1, got 0"),
    "pages": (lambda: make(pages=-1), "pages: pages must be a whole number of at least 0, got -1"),
    "sinks": (lambda: make(sinks=1.5), "pages: sinks must be a whole number of at least 0, got 1.5"),
    "scale": (lambda: make(scale=0), "pages: scale must be a positive finite number, got 0"),
    "cross-attention": (
        lambda: make()(x, x[:, :, :4], x[:, :, :4], causal=True),
        "pages: causal=True needs as many queries as keys, got 10 and 4; "
        "to continue a sequence, use extend(q, k, v, state)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    with pytest.raises((errors.ConfigError, errors.ShapeError)) as caught:
        call()
    assert str(caught.value) == words


def test_a_classifier_may_be_causal() -> None:
    config = SubquadConfig(
        vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, attention="pages", causal=True
    )
    assert SubquadForSequenceClassification(config)(torch.ones(1, 5, dtype=torch.int64)).logits.shape == (1, 2)


def test_the_repr_has_all_options() -> None:
    want = "PagesAttention(head_dim=6, pages=2, page=4, window=8, sinks=3, scale=0.4082)"
    assert repr(make()) == want


def test_compiled_in_one_graph() -> None:
    pytest.importorskip("torch._dynamo")
    inputs = make_inputs(make(), 60).to(torch.float32)
    compiled = torch.compile(make(), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs, causal=True), make()(*inputs, causal=True), 1e-6)


def test_engines_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = choice_native.choose
    monkeypatch.setattr(choice_native, "choose", lambda *args: called.append(len(args)) or original(*args))
    inputs = make_inputs(make(), 90)
    make()(*inputs, causal=True)
    assert not called, "float64 is torch's"
    make()(*inputs.to(torch.float32), causal=True)
    assert len(called) == 1
