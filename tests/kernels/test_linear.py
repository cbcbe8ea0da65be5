"""Features of linear attention near the smallest numbers: averages, zeros and finite gradients, on every engine."""

import pytest
import torch
from torch import Tensor

from subquad import LinearAttention
from subquad.features.elementwise import smallest
from subquad.kernels.cpu import library
from subquad.testing.inputs import assert_close

BACKENDS = ["torch", pytest.param("cpu", marks=[] if library.AVAILABLE else pytest.mark.skip(library.WHY_MISSING))]
# the argument at which features are as large as said
TINY = {
    "elu1": [-50.0, -68.0, -70.0, -80.0, -88.0, -95.0, -100.0, -200.0],
    "softplus": [-50.0, -68.0, -70.0, -80.0, -88.0, -95.0, -100.0, -200.0],
    "relu": [1e-20, 1e-30, 1e-31, 1e-37, 1e-39, 1e-44],
    "relu2": [1e-9, 1e-15, 1e-16, 1e-19, 2e-20, 1e-22],
}
CASES = [(name, x) for name, values in TINY.items() for x in values]


def tokens(size: float, places: str) -> list[Tensor]:
    """Ordinary tokens, except that numbers of q, k or both are about `size`."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=generator)
    near = size * (1 + 0.01 * torch.rand(2, 1, 2, 70, 8, generator=generator))
    return [near[0] if "q" in places else q, near[1] if "k" in places else k, v]


@pytest.mark.parametrize("places", ["q", "k", "qk"])
@pytest.mark.parametrize(("feature_map", "size"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients(backend: str, feature_map: str, size: float, places: str) -> None:
    """An average where features count, exact zeros where they do not; gradients are numbers in any case."""
    attention = LinearAttention(8, feature_map=feature_map, backend=backend)
    leaves = [t.requires_grad_() for t in tokens(size, places)]
    counts = float(attention._phi(torch.tensor([1.01 * size])).item()) >= smallest(torch.float32)
    for causal in (False, True):
        out = attention(*leaves, causal=causal)
        want = attention.reference(*leaves, causal=causal)
        assert_close(out, want, 1e-5, f"causal={causal}")
        if not counts:
            assert not bool(out.any()), f"causal={causal}"
        for name, grad in zip("qkv", torch.autograd.grad(out, leaves, 1e3 * torch.ones_like(out)), strict=True):
            assert bool(grad.isfinite().all()), f"gradient of {name}, causal={causal}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("feature_map", "of_q", "of_k"),
    [("relu", 1e-7, 1e-30), ("relu", 1e-5, 1e-30), ("relu", 0.035, 1.2e-30), ("relu2", 3e-4, 1e-15)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_queries_of_tiny_keys(backend: str, feature_map: str, of_q: float, of_k: float, causal: bool) -> None:
    """Where both are small, so are values or their gradients: none may leave float32 on the way."""
    generator = torch.Generator().manual_seed(0)
    numbers = 1 + torch.rand(3, 1, 2, 70, 8, generator=generator)
    grad = 1e3 * torch.randn(1, 2, 70, 8, generator=generator)
    attention = LinearAttention(8, feature_map=feature_map, backend=backend)
    for of_v in (1.0, 1e-6):
        leaves = [(size * x).requires_grad_() for size, x in zip((of_q, of_k, of_v), numbers, strict=True)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out, want = attention(*leaves, causal=causal), attention.reference(*exact, causal=causal)
        assert_close(out, want, 1e-5)
        wants = torch.autograd.grad(want, exact, grad.double())
        for name, g, w in zip("qkv", torch.autograd.grad(out, leaves, grad), wants, strict=True):
            terms = float(grad.norm() * of_v / of_q) if name == "q" else 0.0  # which cancel: all weights are much alike
            assert_close(g, w, 1e-5, f"gradient of {name}", terms)


@pytest.mark.parametrize(("feature_map", "size"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding(backend: str, feature_map: str, size: float) -> None:
    attention = LinearAttention(8, feature_map=feature_map, backend=backend)
    q, k, v = tokens(size, "qk")
    with torch.no_grad():
        want, state, out = attention(q, k, v, causal=True), None, []
        for t in range(70):
            row, state = attention.extend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
            out.append(row)
    assert_close(torch.cat(out, 2), want, 1e-5, "token by token")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", list(TINY))
def test_tiny_tokens_among_others(backend: str, feature_map: str) -> None:
    """Rows that see large and tiny keys, and large and tiny rows in one block, are those of float64."""
    attention = LinearAttention(8, feature_map=feature_map, backend=backend)
    q, k, v = tokens(1.0, "")
    small = TINY[feature_map][-2]
    q[:, :, ::3], k[:, :, ::2] = small, small
    double = [t.double().requires_grad_() for t in (q, k, v)]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for causal in (False, True):
        out, want = attention(*leaves, causal=causal), attention.reference(*double, causal=causal)
        rows = [t for t in range(1, 70) if t % 3]  # of tiny queries float32 has no digits
        assert_close(out[:, :, rows], want[:, :, rows], 1e-5, f"causal={causal}")
        for name, grad in zip("qkv", torch.autograd.grad(out.square().sum(), leaves), strict=True):
            assert bool(grad.isfinite().all()), f"gradient of {name}, causal={causal}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_may_return_tiny_features(backend: str) -> None:
    attention = LinearAttention(8, feature_map=lambda x: x.abs() * 1e-40, backend=backend)
    leaves = [t.requires_grad_() for t in tokens(1.0, "")]
    out = attention(*leaves, causal=True)
    assert not bool(out.any())
    for grad in torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_that_are_tiny_although_features_are_not(backend: str) -> None:
    """The large feature of a query meets keys that have none; the rest is below what can be divided by."""
    attention = LinearAttention(2, feature_map="relu", backend=backend)
    q, k = torch.tensor([1.0, 1e-20]).expand(1, 1, 3, 2), torch.tensor([0.0, 1e-20]).expand(1, 1, 3, 2)
    leaves = [t.clone().requires_grad_() for t in (q, k, torch.randn(1, 1, 3, 2))]
    out = attention(*leaves, causal=True)
    assert not bool(out.any())
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert not bool(grad.any())


@pytest.mark.parametrize(("query", "key"), [(1e-6, 1e-27), (1e15, 1e30), (1e6, 1e33)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_querys_own_size_cancels(backend: str, query: float, key: float) -> None:
    """Products that leave float32, or count as zero, where a query's largest feature were not taken out."""
    attention = LinearAttention(8, feature_map="relu", backend=backend)
    q, k, v = tokens(1.0, "")
    leaves = [t.requires_grad_() for t in (query * q.abs(), key * k.abs().clamp(0.005, 0.01), v)]
    double = [t.detach().double().requires_grad_() for t in leaves]
    for causal in (False, True):
        out, want = attention(*leaves, causal=causal), attention.reference(*double, causal=causal)
        assert_close(out, want, 1e-5, f"causal={causal}")
        got, exact = (torch.autograd.grad(o.square().sum(), x[2])[0] for o, x in ((out, leaves), (want, double)))
        assert_close(got, exact, 1e-5, f"gradient, causal={causal}")
    with torch.no_grad():
        row, want = attention.extend(leaves[0], leaves[1], leaves[2])[0], attention(*leaves, causal=True)
    assert_close(row, want, 1e-5, "decoding")
