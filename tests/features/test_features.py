"""FAVOR+ is proved, not believed: means, variances and couplings of the random features against their closed forms."""

import itertools
import math
import statistics
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import subquad
from subquad import FavorAttention, LinearAttention, SoftmaxAttention
from subquad.features import draws
from subquad.testing import assert_close, relative_error

D = 16
BLOCKS = 20_000  # independent draws of D rows each


def rows(coupling: str, seed: int = 0) -> Tensor:
    """`[BLOCKS, D, D]`: independent draws."""
    generator = torch.Generator().manual_seed(seed)
    return draws.gaussian_rows(BLOCKS * D, D, coupling, generator).view(BLOCKS, D, D)


def pair(length: float, direction: str) -> tuple[Tensor, Tensor]:
    """x, y with |x + y| = length, along +-(1, ..., 1) (where a QR without sign fix is biased) or anywhere."""
    generator = torch.Generator().manual_seed(1)
    ones, anywhere = torch.ones(D, dtype=torch.float64), torch.randn(D, generator=generator, dtype=torch.float64)
    z = {"+ones": ones, "-ones": -ones, "anywhere": anywhere}[direction]
    z = length * z / z.norm()
    apart = 0.3 * torch.randn(D, generator=generator, dtype=torch.float64)
    return z / 2 + apart, z / 2 - apart


def estimates(estimator: str, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """exp(x.y) estimated by each draw, by the textbook formula. `[BLOCKS]`."""
    half_norms = (x @ x + y @ y) / 2
    if estimator == "trigonometric":
        return half_norms.exp() * (weight @ (x - y)).cos().mean(-1)
    if estimator == "hyperbolic":
        return (-half_norms).exp() * (weight @ (x + y)).cosh().mean(-1)
    return (weight @ (x + y) - half_norms).exp().mean(-1)


def standard_error(samples: Tensor) -> float:
    return (samples.std() / math.sqrt(len(samples))).item()


def deviation(samples: Tensor, expected: float) -> float:
    """Distance of the mean from what it should be, in standard errors."""
    return abs(samples.mean().item() - expected) / standard_error(samples)


@pytest.mark.parametrize("direction", ["+ones", "-ones", "anywhere"])
@pytest.mark.parametrize("coupling", draws.COUPLINGS)
@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "trigonometric"])
def test_unbiased(estimator: str, coupling: str, direction: str) -> None:
    x, y = pair(1.0, direction)
    assert deviation(estimates(estimator, rows(coupling), x, y), (x @ y).exp().item()) < 4


def test_unbiased_would_see_a_missing_sign_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain_qr(dim: int, generator: torch.Generator) -> Tensor:
        return torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]

    monkeypatch.setattr(draws, "haar", plain_qr)
    x, y = pair(1.0, "+ones")
    assert deviation(estimates("positive", rows("orthogonal"), x, y), (x @ y).exp().item()) > 10


def test_rows_are_orthogonal_with_chi_norms() -> None:
    weight = rows("orthogonal")
    gram = weight @ weight.mT
    assert (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() < 1e-12
    squared_norms = gram.diagonal(dim1=1, dim2=2).flatten()  # chi-squared: mean D, variance 2 D
    assert deviation(squared_norms, D) < 4
    assert deviation((squared_norms - D).square(), 2 * D) < 4
    partial = draws.gaussian_rows(D + 3, D, "orthogonal", torch.Generator().manual_seed(0))
    assert partial.shape == (D + 3, D)


def closed_variance(estimator: str, x: Tensor, y: Tensor) -> float:
    """Relative variance of one draw of D independent rows: Var(K) / K^2."""
    z, apart = ((x + y) @ (x + y)).item(), ((x - y) @ (x - y)).item()
    if estimator == "trigonometric":
        return math.exp(apart) * (1 - math.exp(-apart)) ** 2 / (2 * D)
    positive = math.expm1(z) / D
    return positive if estimator == "positive" else (1 - math.exp(-z)) / 2 * positive


@pytest.mark.parametrize("length", [0.5, 1.0, 1.4])
@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "trigonometric"])
def test_variance_is_the_closed_form(estimator: str, length: float) -> None:
    x, y = pair(length, "anywhere")
    relative = estimates(estimator, rows("iid"), x, y) / (x @ y).exp()
    assert deviation((relative - 1).square(), closed_variance(estimator, x, y)) < 4


def orthogonal_variance(z: float) -> float:
    """Relative variance of one draw of D orthogonal rows: the covariance of two rows, as a double series."""

    def rising(a: float, n: int) -> float:
        return math.prod(a + i for i in range(n))

    h = D / 2
    joint = sum(
        (z / 2) ** (a + b) / (math.factorial(a) * math.factorial(b)) * rising(h, a) * rising(h, b) / rising(h, a + b)
        for a in range(30)
        for b in range(30)
    )
    return (math.expm1(z) + (D - 1) * (joint * math.exp(-z) - 1)) / D


@pytest.mark.parametrize("length", [0.5, 1.0, 1.4])
def test_orthogonal_variance_is_the_closed_form_and_below_iid(length: float) -> None:
    x, y = pair(length, "anywhere")
    relative = estimates("positive", rows("orthogonal"), x, y) / (x @ y).exp()
    expected = orthogonal_variance(length**2)
    assert deviation((relative - 1).square(), expected) < 4
    assert expected < closed_variance("positive", x, y)
    independent = estimates("positive", rows("iid"), x, y) / (x @ y).exp()
    assert relative.var() < independent.var()


@pytest.mark.parametrize("estimator", ["positive", "hyperbolic"])
@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_the_mechanism_uses_these_estimators(estimator: str, kernel: str) -> None:
    """One value of one and another of zero: the output is the weight of the first key, from the drawn rows alone."""
    attention = FavorAttention(D, 32, near=0, sinks=0, estimator=estimator, kernel=kernel, scale=1.0)
    q, k = 0.4 * torch.randn(2, 1, 1, 2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = attention.feature_map.query[0, :16] if estimator == "hyperbolic" else attention.feature_map.query[0]
    first, second = (estimates(estimator, drawn.double(), q[0, 0, 0], y) for y in k[0, 0])
    if kernel == "gaussian":
        first, second = (e * (-y @ y / 2).exp() for e, y in zip((first, second), k[0, 0], strict=True))
    out = attention(q, k, torch.tensor([1.0, 0.0], dtype=torch.float64)[None, None, :, None])
    assert_close(out[0, 0, 0], (first / (first + second))[None], 1e-12, f"{estimator}, {kernel}")


@pytest.mark.parametrize("estimator", ["positive", "hyperbolic", "trigonometric"])
@pytest.mark.parametrize("coupling", draws.COUPLINGS)
def test_error_falls_with_features(estimator: str, coupling: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 100, 32, generator=generator, dtype=torch.float64)
    q, k = q / 4, k / 4
    exact = SoftmaxAttention(32)(q, k, v)
    errors = []
    for num_features in (16, 64, 256, 1024):
        options = {"near": 0, "sinks": 0, "estimator": estimator, "coupling": coupling}
        drawn = [FavorAttention(32, num_features, seed=seed, **options) for seed in range(9)]
        errors.append(statistics.median(relative_error(attention(q, k, v), exact) for attention in drawn))
    assert all(b < 0.75 * a for a, b in itertools.pairwise(errors)), errors  # 1/2 in theory


@pytest.mark.parametrize("causal", [False, True])
def test_far_pairs_and_only_they_are_estimated(causal: bool) -> None:
    """Weights written down pair by pair: sinks, own block, neighbouring blocks exact; all others by features."""
    near, sinks, length = 8, 3, 45
    attention = FavorAttention(D, 24, near=near, sinks=sinks, scale=0.3)
    q, k, v = torch.randn(3, 1, 1, length, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = 0.3**0.5 * q[0, 0], 0.3**0.5 * k[0, 0]
    weight = attention.feature_map.query[0].double()
    weights = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        for j in range(i + 1 if causal else length):
            exact = j < sinks or abs(i // near - j // near) <= 1
            weights[i, j] = (x[i] @ y[j]).exp() if exact else estimates("positive", weight, x[i], y[j])
    want = weights / weights.sum(-1, keepdim=True)
    assert_close(attention.attention_matrix(q, k, causal=causal)[0, 0], want, 1e-12, "attention_matrix")
    assert_close(attention(q, k, v, causal=causal)[0, 0], want @ v[0, 0], 1e-12, "forward")


@pytest.mark.parametrize(
    "make", [lambda **o: FavorAttention(8, 16, **o), lambda **o: LinearAttention(8, num_features=16, **o)]
)
def test_redraw_is_reproducible(make) -> None:
    attention, other = make(seed=1), make(seed=2)
    buffer = attention.weight
    assert not torch.equal(attention.weight, other.weight)
    attention.redraw(2)
    assert torch.equal(attention.weight, other.weight)
    assert attention.weight is buffer, "redraw must write in place: data-parallel wrappers hold on to the buffer"
    assert any(name.endswith("weight") for name in attention.state_dict())


def test_per_head_draws_differ() -> None:
    weight = FavorAttention(8, 16, num_heads=3).feature_map.query
    assert weight.shape == (3, 16, 8)
    assert not torch.equal(weight[0], weight[1])


def test_same_seed_same_bits_in_two_processes() -> None:
    program = (
        "import hashlib, torch, subquad\n"
        "q, k, v = torch.randn(3, 1, 2, 70, 16, generator=torch.Generator().manual_seed(0))\n"
        "a = subquad.FavorAttention(16, 32, seed=5)\n"
        "out = a(q, k, v, causal=True)\n"
        "print(hashlib.sha256(a.weight.numpy().tobytes() + out.numpy().tobytes()).hexdigest())"
    )
    prints = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(prints) == 1
    assert len(prints.pop().strip()) == 64


# What earlier implementations got wrong -------------------------------------------------------------------------------


def favor_with_epsilon(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, mask: Tensor | None = None
) -> Tensor:
    """The formula in common use: one maximum over all keys, epsilon on the features, a mask on the values only."""
    x, y = (t * q.shape[-1] ** -0.25 for t in (q, k))
    logs_q, logs_k = x @ weight.mT, y @ weight.mT
    phi = (logs_q - x.square().sum(-1, keepdim=True) / 2 - logs_q.amax(-1, keepdim=True)).exp() + 1e-4
    psi = (logs_k - y.square().sum(-1, keepdim=True) / 2 - logs_k.amax((-2, -1), keepdim=True)).exp() + 1e-4
    scores = phi @ psi.mT
    scores = scores.tril() if causal else scores
    values = v if mask is None else v * mask[:, None, :, None]
    return scores @ values / scores.sum(-1, keepdim=True)


@pytest.fixture
def performer() -> tuple[FavorAttention, Tensor, Tensor, Tensor, Tensor]:
    attention = FavorAttention(64, 256, near=0, sinks=0)
    q, k, v = torch.randn(3, 1, 2, 128, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return attention, q, k, v, attention.feature_map.query.double()


def test_no_epsilon_swamps_the_signal(performer) -> None:
    attention, q, k, v, weight = performer
    want = attention.reference(q, k, v)
    assert_close(attention(q, k, v), want, 1e-10, "ours")
    old = favor_with_epsilon(q, k, v, weight, causal=False)
    assert relative_error(old, want) > 0.5
    uniform = v.mean(2, keepdim=True).expand_as(v)
    assert relative_error(old, uniform) < relative_error(old, want) / 2, "the old formula is near uniform attention"


def test_a_later_key_does_not_move_earlier_outputs(performer) -> None:
    attention, q, k, v, weight = performer
    changed = k.clone()
    changed[:, :, -1] *= 3
    before, after = (attention(q, key, v, causal=True)[:, :, :-1] for key in (k, changed))
    assert_close(after, before, 1e-12, "ours")
    before, after = (favor_with_epsilon(q, key, v, weight, causal=True)[:, :, :-1] for key in (k, changed))
    assert relative_error(after, before) > 1e-3


def test_padded_keys_leave_the_denominator_too(performer) -> None:
    attention, q, k, v, weight = performer
    mask = (torch.arange(128) < 64)[None]
    want = attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    assert_close(attention(q, k, v, key_mask=mask)[:, :, :64], want, 1e-12, "ours")
    old = favor_with_epsilon(q, k, v, weight, causal=False, mask=mask)[:, :, :64]
    alone = favor_with_epsilon(q[:, :, :64], k[:, :, :64], v[:, :, :64], weight, causal=False)
    assert old.norm() < 0.6 * alone.norm()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_elu_does_not_cancel(backend: str) -> None:
    """In float32 elu(-20) + 1 is 0: all weights vanish. exp(-20) is not 0."""
    q, k, v = torch.randn(3, 1, 1, 10, 4, generator=torch.Generator().manual_seed(0))
    attention = subquad.LinearAttention(4, backend=backend)
    want = attention.reference(*(t.double() for t in (q - 25, k - 25, v)))
    assert_close(attention(q - 25, k - 25, v), want, 1e-5, "inputs around -25")


def test_trigonometric_weights_of_large_keys_are_finite() -> None:
    """exp(|k|^2 / 2) is no float32 here; only its ratios matter."""
    attention = FavorAttention(4, 16, near=0, sinks=0, estimator="trigonometric")
    generator = torch.Generator().manual_seed(0)
    q, k = (centre + 0.1 * torch.randn(1, 1, 5, 4, generator=generator) for centre in (0, 9))
    matrix = attention.attention_matrix(q, k)
    assert bool(matrix.isfinite().all())
    assert_close(matrix, attention.attention_matrix(q.double(), k.double()), 1e-4)
