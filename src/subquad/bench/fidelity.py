"""The error of attention's output against the number of features, for every estimator and coupling.

Errors are |out - exact| / |exact| of each head over all real tokens of sequences that took no part in the fit.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.bench.inputs import SINKS, Input, LayerInput
from subquad.calibration.choice import Fit, best_fit
from subquad.calibration.fitted import learned_attention
from subquad.calibration.moments import Moments, fitted_proposal, weighted_moments
from subquad.features.drawn import DRAWN, FITTED, DrawnFeatures
from subquad.features.draws import derived_seed
from subquad.features.learned import LEARNED
from subquad.mechanisms.favor import FavorAttention
from subquad.recording.baselines import near_attention, uniform_average
from subquad.recording.fidelity import ExactOutputs

BALANCED = "balanced"  # calibrated, after a transform of queries and keys that leaves q.k as it is
ESTIMATORS = (*DRAWN, BALANCED, *LEARNED)
BASELINES = ("uniform", "window")
ROWS = 256  # queries per batch whose exact attention weighs the statistics
LEARNED_MOST = 128  # features of a learned map: more take long to train, and gain little


class Plan(NamedTuple):
    """What is measured on every input."""

    estimators: tuple[str, ...]
    couplings: tuple[str, ...]
    features: tuple[int, ...]
    draws: int = 5
    near: tuple[bool, ...] = (False, True)  # without and with near blocks and sinks
    steps: int = 100  # of training learned maps
    seed: int = 0

    def cells(self, near: bool) -> Iterator[tuple[str, str, int, int]]:
        """Estimator, coupling, number of features and draws.

        A learned map is trained once, from the first coupling, and near blocks are tried with the first alone.
        """
        for estimator in self.estimators:
            if estimator == "trigonometric" and near:
                continue  # signed features do not mix with exact weights
            learned = estimator in LEARNED
            for coupling in self.couplings[:1] if learned or near else self.couplings:
                for num_features in self.features:
                    if not learned or num_features <= max(LEARNED_MOST, min(self.features)):
                        yield estimator, coupling, num_features, 1 if learned else self.draws

    def work(self, given: Input) -> int:
        """Layers times draws: the steps of a progress bar."""
        return len(given.layers) * sum(cell[3] for near in self.near for cell in self.cells(near))


@dataclass(frozen=True)
class Record:
    """One point: the mean error over heads and draws, and standard errors of it over heads and over draws."""

    input: str
    near: int
    sinks: int
    estimator: str
    coupling: str
    num_features: int
    draws: int
    heads: int
    mean: float
    se_heads: float
    se_draws: float
    by_head: tuple[float, ...]


def measure(given: Input, plan: Plan, progress: Callable[[int], None] | None = None) -> list[Record]:
    """All cells of the plan and both baselines."""
    records = []
    for near in plan.near:
        block, sinks = (given.near, SINKS) if near else (0, 0)
        found: dict[tuple[str, str, int], list[Tensor]] = {}
        for number, layer in enumerate(given.layers):
            asked = Asked(layer, block, sinks, derived_seed(plan.seed, number))
            for name in BASELINES if near else BASELINES[:1]:
                found.setdefault((name, "", 0), []).append(asked.baseline(name)[None])
            for estimator, coupling, num_features, draws in plan.cells(near):
                errors = []
                for mechanism in asked.mechanisms(estimator, coupling, num_features, draws, plan.steps):
                    errors.append(asked.test.errors(mechanism))
                    if progress is not None:
                        progress(1)
                found.setdefault((estimator, coupling, num_features), []).append(torch.stack(errors))
        for key, errors in found.items():
            records.append(_record(given.name, block, sinks, key, torch.cat(errors, 1)))
    return records


def _record(name: str, near: int, sinks: int, key: tuple[str, str, int], errors: Tensor) -> Record:
    """errors `[draws, heads]`."""
    draws, heads = errors.shape
    by_head = errors.mean(0).tolist()
    se_heads, se_draws = (_standard_error(x.tolist()) for x in (errors.mean(0), errors.mean(1)))
    return Record(name, near, sinks, *key, draws, heads, float(errors.mean()), se_heads, se_draws, tuple(by_head))


def _standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0 for one value, of which nothing is known."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


class Asked:
    """One layer with its exact outputs, and what was fitted to it so far."""

    def __init__(self, layer: LayerInput, near: int, sinks: int, seed: int) -> None:
        self.layer, self.near, self.sinks, self.seed = layer, near, sinks, seed
        self.test = ExactOutputs(layer.test)
        self.moments: dict[bool, Moments] = {}
        self.fits: dict[tuple[str, int], Fit] = {}

    @property
    def key_heads(self) -> int:
        return self.layer.test[0].k.shape[1]

    def favor(self, estimator: str, coupling: str, num_features: int) -> FavorAttention:
        """With features of their own in each key head, not fitted yet."""
        first, balanced = self.layer.test[0], estimator == BALANCED
        options: dict[str, Any] = {"near": self.near, "sinks": self.sinks, "scale": first.scale, "coupling": coupling}
        mechanism = FavorAttention(first.q.shape[-1], num_features, **options)
        name = "calibrated" if balanced else estimator
        mechanism.set_features(name, num_features, self.key_heads, transform=balanced)
        return mechanism

    def mechanisms(
        self, estimator: str, coupling: str, num_features: int, draws: int, steps: int
    ) -> Iterator[FavorAttention]:
        """One for each draw, fitted."""
        for draw in range(draws):
            seed = derived_seed(self.seed, draw)
            mechanism = self.favor(estimator, coupling, num_features)
            if estimator in LEARNED:
                how = {"steps": steps, "rows": ROWS, "seed": seed}
                mechanism = learned_attention(mechanism, self.layer.fit, estimator, num_features, **how)
            elif mechanism.estimator in FITTED:
                assert isinstance(mechanism.features, DrawnFeatures)
                self.fit(estimator, num_features).apply(mechanism.features, seed)
            else:
                mechanism.redraw(seed)
            yield mechanism.requires_grad_(False)

    def fit(self, estimator: str, num_features: int) -> Fit:
        """Does not depend on the coupling, "optimal" and "sharp" not on the number of features either."""
        alike = estimator in ("optimal", "sharp")
        key = estimator, 0 if alike else num_features
        if alike not in self.moments:
            plain = self.favor("positive", "orthogonal", 1)
            sample = {"rows": ROWS, "seed": self.seed, "alike": alike}
            self.moments[alike] = weighted_moments(plain, self.layer.fit, self.key_heads, **sample)
        if key not in self.fits:
            tried = self.favor(estimator, "orthogonal", num_features)
            self.fits[key] = (
                Fit(fitted_proposal(estimator, self.moments[alike]))
                if alike
                else best_fit(tried, self.layer.fit, self.moments[alike], seed=self.seed)
            )
        return self.fits[key]

    def baseline(self, name: str) -> Tensor:
        """Errors of the "uniform" average of all visible values, or of near blocks and sinks alone ("window")."""
        if name == "uniform":
            return self.test.errors(uniform_average)
        mechanism = self.favor("positive", "iid", 1)
        return self.test.errors(lambda call: near_attention(mechanism, call))


def default_estimators(name: str, real: Sequence[str]) -> tuple[str, ...]:
    """All drawn ones, and on real heads the better of the learned."""
    return (*DRAWN, BALANCED, "hedgehog") if name in real else (*DRAWN, BALANCED)


@torch.no_grad()
def attention_maps(given: Input, plan: Plan, *, tokens: int = 96) -> tuple[str, dict[str, Tensor]]:
    """Matrices `[T, T]` of one head for the beginning of a sequence, exact and estimated, and which head it is.

    The head is the one that FAVOR+ finds neither easy nor hard: its error is the median. No near blocks, no sinks.
    """
    layer = given.layers[len(given.layers) // 2]
    asked = Asked(layer, 0, 0, derived_seed(plan.seed, len(given.layers) // 2))
    most = max(plan.features)
    learned = [name for name in plan.estimators if name in LEARNED][:1]
    wanted = {f"FAVOR+, {most} features": ("positive", most)}
    if any(name in FITTED for name in plan.estimators):
        wanted[f"calibrated, {most} features"] = ("calibrated", most)
    for name in learned:
        wanted[f"learned, {min(most, LEARNED_MOST)} features"] = (name, min(most, LEARNED_MOST))
    made = {
        title: next(asked.mechanisms(estimator, plan.couplings[0], size, 1, plan.steps))
        for title, (estimator, size) in wanted.items()
    }
    first = next(iter(made))
    errors = asked.test.errors(made[first])
    head = int(errors.argsort()[len(errors) // 2])
    one = layer.test[0].sequences(torch.tensor([0]))
    length = min(tokens, int(one.real.sum()))
    q, k = one.q[:, :, :length], one.k[:, :, :length]
    short = one.replace(q=q, k=k, v=one.v[:, :, :length], key_mask=None)
    maps = {"exact": short.exact_weights(torch.arange(length))[0, head]}
    for title, mechanism in made.items():
        maps[title] = mechanism.attention_matrix(q, k, causal=one.causal)[0, head]
    return f"{given.title.split(':')[0]}; {layer.name}, head {head}", maps
