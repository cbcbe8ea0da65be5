"""The proposal of each head is the one that does best, and measuring says which."""

import pytest
import torch

from subquad.calibration import choice
from subquad.calibration.choice import Fit, best_fit, candidates
from subquad.calibration.moments import Moments, fitted_proposal, pair_moments
from subquad.features.drawn import DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.fidelity import ExactOutputs

HEADS, LENGTH, DIM = 3, 60, 8


def asked(seed: int) -> Call:
    """A head with small queries, one with a few long directions, one whose tokens differ in size."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, HEADS, LENGTH, DIM, generator=generator) for _ in range(3))
    q[:, 0] *= 0.1
    q[:, 1, :, 0] *= 5.0
    k[:, 2] *= torch.linspace(0.1, 6.0, LENGTH)[:, None]
    return Call(q, k, v, causal=False, key_mask=None, scale=DIM**-0.5)


def layer(transform: bool) -> tuple[FavorAttention, DrawnFeatures]:
    attention = FavorAttention(DIM, 32, near=0, sinks=0)
    attention.set_features("calibrated", 32, HEADS, transform=transform)
    assert isinstance(attention.features, DrawnFeatures)
    return attention, attention.features


def moments_of(attention: FavorAttention, call: Call) -> Moments:
    return pair_moments(attention, [call], rows=LENGTH, seed=0, alike=False)


@pytest.mark.parametrize("transform", [False, True])
def test_candidates_go_from_the_fitted_one_to_favor_plus(transform: bool) -> None:
    attention, features = layer(transform)
    fits = candidates(moments_of(attention, asked(0)), transform)
    eye = torch.eye(DIM, dtype=torch.float64).expand(HEADS, -1, -1)
    volumes = torch.stack([torch.linalg.slogdet(fit.proposal.root).logabsdet for fit in fits])
    assert bool((volumes[:-2] > volumes[1:-1]).all())
    torch.testing.assert_close(fits[-2].proposal.root, eye)  # around the mean
    assert bool((fits[-2].proposal.mean != 0).any())
    fits[-1].apply(features, 5)
    plain = FavorAttention(DIM, 32, near=0, sinks=0, num_heads=HEADS)
    plain.redraw(5)
    call = asked(1)
    torch.testing.assert_close(call.attend(attention), call.attend(plain))


def test_a_narrower_proposal_has_less_spread_and_the_same_mean() -> None:
    moments = moments_of(layer(False)[0], asked(0))
    wide, narrow = (fitted_proposal("calibrated", moments, width=width) for width in (1.0, 0.25))
    assert torch.equal(wide.mean, narrow.mean)
    sizes = [torch.linalg.eigvalsh(p.root) for p in (wide, narrow)]
    assert bool((sizes[0] > sizes[1]).all())


@pytest.mark.parametrize("transform", [False, True])
def test_the_best_is_taken_head_by_head(transform: bool) -> None:
    """Measured here once more, by the errors of the report."""
    attention, features = layer(transform)
    call = asked(0)
    moments = moments_of(attention, call)
    fits = candidates(moments, transform)
    errors = []
    for fit in fits:
        found = []
        for draw in range(choice.DRAWS):
            fit.apply(features, derived_seed(3, draw, 1))
            found.append(ExactOutputs([call]).errors(attention))
        errors.append(torch.stack(found).mean(0))
    table = torch.stack(errors)
    table[0] *= choice.MARGIN
    chosen = table.argmin(0).tolist()
    assert len(set(chosen)) > 1, "one candidate is best everywhere, this test shows nothing"
    best = best_fit(attention, [call], moments, seed=3)
    for head, number in enumerate(chosen):
        for ours, theirs in zip(best.proposal, fits[number].proposal, strict=True):
            assert torch.equal(ours[head], theirs[head])
        for ours, theirs in zip(best.turns or (), fits[number].turns or (), strict=True):
            assert torch.equal(ours[head], theirs[head])
    assert (best.turns is None) == (not transform)


def test_luck_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is hardly better than the fitted one is not taken."""
    attention, _ = layer(False)
    moments = moments_of(attention, asked(0))
    monkeypatch.setattr(choice, "MARGIN", 0.0)
    best = best_fit(attention, [asked(0)], moments, seed=3)
    assert torch.equal(best.proposal.root, fitted_proposal("calibrated", moments).root)


def test_a_few_thousand_tokens_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TOKENS", 3 * LENGTH)
    some = choice._some([asked(0), asked(1), asked(2)])
    assert [len(call.q) for call in some] == [2, 1]
    assert torch.equal(some[0].q, asked(2).q)
    assert torch.equal(some[1].q, asked(1).q[:1])


def test_fits_are_set_with_their_transforms() -> None:
    attention, features = layer(True)
    moments = moments_of(attention, asked(0))
    fit = candidates(moments, True)[0]
    assert isinstance(fit, Fit)
    fit.apply(features, 1)
    assert fit.turns is not None
    torch.testing.assert_close(features.query_transform, fit.turns[0].float())
    torch.testing.assert_close(features.key_transform, fit.turns[1].float())
    torch.testing.assert_close(features.mean, fit.proposal.mean.float())
