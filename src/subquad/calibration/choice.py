"""The proposal of each head for `calibrated`: a few are tried, and the one with the smallest measured error is taken.

`fitted_proposal` minimises the mean logarithm of the variance. Where attention is too sharp for the number of features,
the error is that of a few dominating rows, and a narrower proposal, or none at all, does better: only measuring tells.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.calibration.moments import Moments, balancing, fitted_proposal, transformed
from subquad.features.drawn import DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.features.proposals import Proposal
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.calls import Call
from subquad.recording.fidelity import ExactOutputs

WIDTHS = (1.0, 0.25, 0.0)  # of the spread of the pairs; 0: rows are N(mean, I)
DRAWS = 2
TOKENS = 2048  # queries that are measured
MARGIN = 0.97  # a proposal must be this much better than the first, or it is taken for luck


class Fit(NamedTuple):
    """Where rows are drawn from, and the transforms of queries and keys if there are any, `[heads, D, D]` each."""

    proposal: Proposal
    turns: tuple[Tensor, Tensor] | None = None

    def apply(self, features: DrawnFeatures, seed: int) -> None:
        """Sets the buffers and draws."""
        if self.turns is not None:
            assert features.query_transform is not None
            assert features.key_transform is not None
            features.query_transform.copy_(self.turns[0])
            features.key_transform.copy_(self.turns[1])
        features.fit(self.proposal, seed)


def candidates(moments: Moments, transform: bool) -> list[Fit]:
    """The fitted one first; the last is FAVOR+."""
    turns = balancing(moments) if transform else None
    turned = moments if turns is None else transformed(moments, *turns)
    fits = [Fit(fitted_proposal("calibrated", turned, width=width), turns) for width in WIDTHS]
    heads, dim = moments.x.shape
    eye = torch.eye(dim, dtype=torch.float64, device=moments.x.device).repeat(heads, 1, 1)
    return [*fits, Fit(Proposal(torch.zeros_like(moments.x), eye), None if turns is None else (eye, eye))]


@torch.no_grad()
def best_fit(mechanism: FavorAttention, calls: Sequence[Call], moments: Moments, *, seed: int) -> Fit:
    """Of the candidates the best for each head of the map; leaves the features of `mechanism` at the last one tried."""
    features = mechanism.features
    assert isinstance(features, DrawnFeatures)
    fits = candidates(moments, mechanism.transform)
    some = ExactOutputs(_some(calls))
    errors = torch.stack([_errors(mechanism, fit, some, seed) for fit in fits])  # [candidates, map heads]
    errors[0] *= MARGIN
    errors = errors.nan_to_num(torch.inf)
    return _picked(fits, errors.argmin(0).to(moments.x.device))


def _some(calls: Sequence[Call]) -> list[Call]:
    """About TOKENS queries, from the last batches."""
    found, left = [], TOKENS
    for call in reversed(calls):
        count = max(1, min(len(call.q), left // call.q.shape[2]))
        found.append(call.sequences(torch.arange(count, device=call.q.device)))
        left -= count * call.q.shape[2]
        if left <= 0:
            break
    return found


def _errors(mechanism: FavorAttention, fit: Fit, some: ExactOutputs, seed: int) -> Tensor:
    """Mean over draws and over the heads that share a map, `[map heads]`."""
    features = mechanism.features
    assert isinstance(features, DrawnFeatures)
    found = []
    for draw in range(DRAWS):
        fit.apply(features, derived_seed(seed, draw, 1))
        found.append(some.errors(mechanism))
    return torch.stack(found).mean(0).unflatten(0, (len(features.weight), -1)).mean(1)


def _picked(fits: Sequence[Fit], choice: Tensor) -> Fit:
    """From the candidate `choice[head]` what belongs to each head."""
    heads = torch.arange(len(choice), device=choice.device)
    mean, root = (torch.stack(tensors)[choice, heads] for tensors in zip(*(fit.proposal for fit in fits), strict=True))
    turns = [fit.turns for fit in fits if fit.turns is not None]
    if not turns:
        return Fit(Proposal(mean, root))
    query, key = (torch.stack(tensors)[choice, heads] for tensors in zip(*turns, strict=True))
    return Fit(Proposal(mean, root), (query, key))
