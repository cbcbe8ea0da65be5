"""Rows from any Gaussian estimate the same thing: means, variances, and what calibration makes of real pairs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fitted import some_proposal
from subquad import FavorAttention
from subquad.calibration import moments as moments_module
from subquad.calibration.moments import Moments, balancing, fitted_proposal, pair_moments, transformed
from subquad.errors import SubquadError
from subquad.features import Proposal, draw_feature_map, draws
from subquad.features.positive import draw_rows
from subquad.features.proposals import isotropic, prior, shaped, widening
from subquad.recording.calls import Call
from subquad.testing import assert_close

D, BLOCKS = 8, 20_000


def vectors(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(dim: int) -> Proposal:
    """Wide enough for the fourth moments that a test of the variance needs."""
    mean, root = some_proposal(1, dim)
    return Proposal(mean, 1.2 * root)


def stretched(dim: int) -> Proposal:
    some = vectors(1, dim, dim, size=0.3 * (D / dim) ** 0.5)
    return shaped(torch.zeros(1, dim), some @ some.mT)


PROPOSALS = {"optimal": lambda dim: isotropic(torch.tensor([0.4]), dim), "sharp": stretched, "calibrated": wide}


def estimates(proposal: Proposal, coupling: str, x: Tensor, y: Tensor) -> Tensor:
    """exp(x.y) by each of BLOCKS draws of as many rows as dimensions."""
    dim = len(x)
    rows = draw_rows(dim, BLOCKS * dim, coupling=coupling, num_heads=1, seed=0, proposal=proposal)
    logs = rows.log_weight[0].double() + rows.weight[0].double() @ (x + y) - (x @ x + y @ y) / 2
    return logs.exp().view(BLOCKS, dim).mean(1)


def deviation(samples: Tensor, expected: float) -> float:
    """Distance of the mean from what it should be, in standard errors."""
    return abs(samples.mean().item() - expected) / (samples.std() / math.sqrt(len(samples))).item()


@pytest.mark.parametrize("coupling", draws.COUPLINGS)
@pytest.mark.parametrize("kind", PROPOSALS)
def test_unbiased(kind: str, coupling: str) -> None:
    dim = 32 if coupling == "hadamard" else D
    x, y = vectors(2, dim, size=0.3 * (D / dim) ** 0.5)
    assert deviation(estimates(PROPOSALS[kind](dim), coupling, x, y), (x @ y).exp().item()) < 4


def closed_variance(proposal: Proposal, z: Tensor) -> float:
    """Relative variance of one row."""
    values, directions = torch.linalg.eigh(proposal.root[0] @ proposal.root[0].mT)
    t = 2 * values - 1
    assert bool((t > 0).all()), "infinite variance"
    shift = directions.mT @ (z - proposal.mean[0])
    return ((values / t.sqrt()).log() + shift.square() / t).sum().exp().item() - 1


@pytest.mark.parametrize("kind", PROPOSALS)
def test_variance_is_the_closed_form(kind: str) -> None:
    x, y = vectors(2, D, size=0.2)
    proposal = PROPOSALS[kind](D)
    relative = estimates(proposal, "iid", x, y) / (x @ y).exp()
    assert deviation((relative - 1).square(), closed_variance(proposal, x + y) / D) < 4


def test_widening_is_the_best() -> None:
    """Against a grid, and against the published optimum A* = (1 - 1/phi) / 8 of FAVOR++."""
    for moment in (0.01, 0.3, 1.0, 7.0):
        grid = torch.linspace(0.5, 60, 400_000, dtype=torch.float64)
        cost = ((1 + grid) / 2).log() - grid.log() / 2 + moment / grid
        best = widening(torch.tensor(moment, dtype=torch.float64)).item()
        assert abs(grid[cost.argmin()].item() - best) < 1e-3
        z, d = moment * 64, 64
        phi = (math.sqrt((2 * z + d) ** 2 + 8 * d * z) - 2 * z - d) / (4 * z)
        assert abs((1 - best) / 8 - (1 - 1 / phi) / 8) < 1e-12


def test_rows_are_those_of_the_published_form() -> None:
    """D^2 exp(2 e'Ae + e'B(x + y) - (|x|^2 + |y|^2) / 2), e ~ N(0, I), sample by sample: FAVOR#."""
    moment = vectors(1, D, D, size=0.3) @ vectors(1, D, D, size=0.3).mT
    proposal = shaped(torch.zeros(1, D), moment)
    generator = torch.Generator("cpu").manual_seed(3)
    noise = draws.gaussian_rows(32, D, "iid", generator)
    values, directions = torch.linalg.eigh(moment[0])
    a = (1 - 2 * values - ((2 * values + 1) ** 2 + 8 * values).sqrt()) / 16
    matrix_a = directions @ a.diag() @ directions.mT
    matrix_b = directions @ (1 - 4 * a).sqrt().diag() @ directions.mT
    x, y = vectors(2, D, size=0.4)
    published = 0.5 * (1 - 4 * a).log().sum() + 2 * ((noise @ matrix_a) * noise).sum(1) + noise @ matrix_b @ (x + y)
    drawn = draw_rows(D, 32, coupling="iid", num_heads=1, seed=3, proposal=proposal)
    ours = drawn.log_weight[0].double() + drawn.weight[0].double() @ (x + y)
    assert_close(ours, published, 1e-6, "float32 rows")


def test_the_prior_is_for_normal_queries_and_keys() -> None:
    """E |sqrt(scale) (q + k)|^2 / D = 2 scale."""
    scale = D**-0.5
    z = scale**0.5 * (vectors(40_000, D) + vectors(40_000, D, seed=1))
    assert deviation(z.square().mean(1), 2 * scale) < 4
    want = isotropic(torch.tensor([2 * scale], dtype=torch.float64), D)
    assert torch.equal(prior(1, D, scale).root, want.root)


# Couplings ------------------------------------------------------------------------------------------------------------


def test_simplex_corners() -> None:
    rows = draws.simplex(D, torch.Generator().manual_seed(0))
    want = torch.full((D, D), -1 / (D - 1), dtype=torch.float64).fill_diagonal_(1)
    assert_close(rows @ rows.mT, want, 1e-12, "gram matrix")


def test_simplex_has_less_variance_than_orthogonal() -> None:
    """For small |x + y|: at 16 dimensions and |z| = 1, D times the variance is e - 1 = 1.718 (iid), 1.343, 0.472."""
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(vectors(16), dim=0)
    ratio = {}
    for coupling in ("iid", "orthogonal", "simplex"):
        rows = draws.gaussian_rows(16 * BLOCKS, 16, coupling, generator).view(BLOCKS, 16, 16)
        ratio[coupling] = (rows @ z).exp().mean(1).var().item()
    assert abs(ratio["simplex"] / ratio["iid"] - 0.472 / 1.718) < 0.03, ratio  # standard error 0.006
    assert ratio["simplex"] < 0.5 * ratio["orthogonal"]


def test_hadamard_blocks_are_orthogonal_and_fast_transforms_right() -> None:
    block = draws.hadamard(16, torch.Generator().manual_seed(0))
    assert_close(block @ block.mT, torch.eye(16, dtype=torch.float64), 1e-12, "gram matrix")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = vectors(16, 3)
    assert_close(draws.walsh(x), matrix @ x / 4, 1e-12, "against the matrix")


@pytest.mark.parametrize(
    ("coupling", "first", "last", "total"),
    [
        ("iid", 0.066267540, 0.895927080, -31.530194906),
        ("orthogonal", 0.072237037, 0.415974787, 4.155700457),
        ("simplex", -0.001430289, 0.282817756, -5.916811491),
        ("hadamard", 0.804998111, 0.253474658, -10.097152231),
    ],
)
def test_a_seed_gives_the_rows_that_it_always_gave(coupling: str, first: float, last: float, total: float) -> None:
    """Runs that are resumed by a later version redraw the same features."""
    rows = draws.gaussian_rows(40, 32, coupling, torch.Generator().manual_seed(7))
    got = torch.stack([rows[0, 0], rows[39, 31], rows.sum()])
    assert_close(got, torch.tensor([first, last, total], dtype=torch.float64), 1e-9)


# Moments of pairs -----------------------------------------------------------------------------------------------------


def some_call(*, causal: bool = True, masked: bool = True, length: int = 30) -> Call:
    q, k, v = vectors(2, 4, length, D), vectors(2, 2, length, D, seed=1), vectors(2, 2, length, D, seed=2)
    mask = torch.arange(length) < torch.tensor([[length], [length - 7]]) if masked else None
    return Call(q, k, v, causal, mask, 0.3)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_moments_pair_by_pair(causal: bool, alike: bool) -> None:
    attention = FavorAttention(D, 16, near=4, sinks=2, num_heads=2, scale=0.3)
    call = some_call(causal=causal)
    got = pair_moments(attention, [call], rows=99, seed=0, alike=alike)
    x, y = 0.3**0.5 * call.q, 0.3**0.5 * call.k
    for head in range(4):
        weight, x_sum, xy = 0.0, torch.zeros(D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
        for b, length in enumerate((30, 23)):
            for i in range(length):
                seen = range(i + 1 if causal else length)
                logits = torch.stack([x[b, head, i] @ y[b, head // 2, j] for j in seen])
                share = torch.full_like(logits, 1 / len(logits)) if alike else logits.softmax(0)
                for j in seen:
                    if j >= 2 and abs(i // 4 - j // 4) > 1:
                        weight += share[j].item()
                        x_sum += share[j] * x[b, head, i]
                        xy += share[j] * x[b, head, i][:, None] * y[b, head // 2, j]
        assert abs(got.weight[head].item() / weight - 1) < 1e-10
        assert_close(got.x[head], x_sum, 1e-10, "sum of x")
        assert_close(got.xy[head], xy, 1e-10, "sum of x y'")


def gaussian_pairs() -> tuple[Moments, Tensor, Tensor]:
    """Moments of known pairs of one head, and these pairs."""
    x, y = vectors(500, D) @ vectors(D, D, size=0.2) + 0.3, vectors(500, D, seed=1) @ vectors(D, D, seed=2) - 0.1
    n = torch.full((1,), 500.0, dtype=torch.float64)
    return Moments(n, x.sum(0)[None], y.sum(0)[None], (x.mT @ x)[None], (y.mT @ y)[None], (x.mT @ y)[None]), x, y


def test_proposals_come_from_the_moments() -> None:
    found, x, y = gaussian_pairs()
    z = x + y
    centred = (z - z.mean(0)).mT @ (z - z.mean(0)) / len(z)
    for estimator, want in (
        ("calibrated", shaped(z.mean(0)[None], centred[None])),
        ("sharp", shaped(torch.zeros(1, D), (z.mT @ z / len(z))[None])),
        ("optimal", isotropic(z.square().mean()[None], D)),
    ):
        got = fitted_proposal(estimator, found)
        assert_close(got.root, want.root, 1e-10, estimator)
        assert (got.mean - want.mean).abs().max() < 1e-10


def test_balancing_makes_queries_and_keys_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "RIDGE", 0.0)
    monkeypatch.setattr(moments_module, "FLOOR", 0.0)
    found, _, _ = gaussian_pairs()
    turn, inverse = balancing(found)
    assert_close(turn @ inverse.mT, torch.eye(D, dtype=torch.float64)[None], 1e-10, "T T^-1")
    moved = transformed(found, turn, inverse).means()
    assert_close(moved.xx, moved.yy, 1e-9, "covariances")
    before = found.means()
    trace = [m.xx.diagonal(dim1=1, dim2=2).sum() + m.yy.diagonal(dim1=1, dim2=2).sum() for m in (before, moved)]
    assert trace[1] < trace[0]


WRONG_PROPOSALS = {
    "another estimator": (
        {"estimator": "hyperbolic", "num_heads": 2},
        some_proposal(2, D),
        "favor: a proposal goes with estimator='positive', got 'hyperbolic'",
    ),
    "heads": ({"num_heads": 3}, some_proposal(2, D), f"favor: mean of the proposal must be [3, {D}], got [2, {D}]"),
    "dims": (
        {"num_heads": 2},
        some_proposal(2, D)._replace(root=torch.eye(D)[None]),
        f"favor: root of the proposal must be [2, {D}, {D}], got [1, {D}, {D}]",
    ),
}


@pytest.mark.parametrize(("options", "proposal", "message"), WRONG_PROPOSALS.values(), ids=WRONG_PROPOSALS)
def test_proposals_that_do_not_fit(options: dict[str, Any], proposal: Proposal, message: str) -> None:
    with pytest.raises(SubquadError) as caught:
        draw_feature_map(D, 8, proposal=proposal, **options)
    assert str(caught.value) == message


def test_a_feature_map_knows_its_sizes() -> None:
    drawn = draw_feature_map(D, 9, num_heads=2, proposal=some_proposal(2, D))
    assert (drawn.head_dim, drawn.num_features, len(drawn.query)) == (D, 9, 2)
