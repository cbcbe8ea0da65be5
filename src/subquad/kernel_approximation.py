"""Random features of kernels for scikit-learn: `pip install 'subquad[sklearn]'`, imported by nothing else in subquad.

Both kernels are exp(u.v) of scaled and centred rows, times a factor of each row,

    rbf      u = sqrt(2 gamma) (x - mean),  exp(-gamma |x - y|^2) = exp(u.v) exp(-|u|^2 / 2) exp(-|v|^2 / 2)
    softmax  u = sqrt(gamma) (x - mean),    exp(gamma x.y)        = exp(u.v) exp(c(u)) exp(c(v)),
                                            c(u) = m.u + |m|^2 / 2, m = sqrt(gamma) mean

whatever the mean is, and exp(u.v) is the mean over rows w ~ N(0, I) of products of features,

    trigonometric  exp(|u|^2 / 2) [cos(w.u), sin(w.u)]
    positive       exp(w.u - |u|^2 / 2)
"""

import math
from typing import Any

import torch

from subquad.checks import choice, needs
from subquad.checks import kernel_approximation as checks
from subquad.features.draws import COUPLINGS, gaussian_rows
from subquad.features.proposals import log_density_ratio, shaped

with needs("'scikit-learn>=1.6'", "subquad.kernel_approximation"):
    import numpy as np
    from scipy.sparse import issparse
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["FavorSampler"]

KERNELS = ("rbf", "softmax")
FEATURES = ("trigonometric", "positive")
HADAMARD_DIM = 64  # in fewer dimensions three random sign flips reach too few directions, and features are biased


class FavorSampler(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features whose products estimate a kernel, without bias: the rows of FAVOR+ in place of RBFSampler.

    Parameters:
        kernel: "rbf", exp(-gamma |x - y|^2), or "softmax", exp(gamma x.y).
        gamma: a number, or "scale": 1 / (n_features * X.var()) for rbf, as in RBFSampler, and
            1 / (n_features * (X**2).mean()) for softmax, whose values depend on the mean too.
        n_components: numbers per row of output. Trigonometric features are pairs; if odd, the last is a cosine with
            a random phase, as all are in RBFSampler.
        features: "trigonometric" (bounded for rbf, best for near pairs) or "positive" (never below zero).
        coupling: of the random rows; "orthogonal" (less variance than "iid"), "simplex" (less still, for positive
            features of small data), "hadamard" (like orthogonal, drawn faster; nearly unbiased).
        proposal: None, rows are N(0, I); "fitted", from a Gaussian wider where the data are, for positive features.
        random_state: int, RandomState or None.

    Attributes:
        gamma_: the number used.
        mean_: `(n_features,)`, of the training rows; data are centred, which leaves the kernel and lowers the variance.
        random_weights_: `(n_features, rows)`, applied to centred and scaled data.
        random_log_weights_: `(rows,)`, of the proposal; zeros without.
        random_offset_: the phase of the cosine without a sine.

    Example:
        >>> import numpy as np
        >>> FavorSampler(n_components=32, random_state=0).fit_transform(np.eye(3)).shape
        (3, 32)
    """

    def __init__(
        self,
        *,
        kernel: str = "rbf",
        gamma: float | str = 1.0,
        n_components: int = 100,
        features: str = "trigonometric",
        coupling: str = "orthogonal",
        proposal: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.n_components = n_components
        self.features = features
        self.coupling = coupling
        self.proposal = proposal
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "FavorSampler":  # noqa: N803 - as scikit-learn names it
        """Draws the rows; of the data it takes the number of features, the mean, the variance and the covariance."""
        self._n_features_out = self._checked_components()
        x = self._dense(X, reset=True).astype(np.float64, copy=False)
        self.gamma_ = self._number(x)
        self.mean_ = x.mean(axis=0)
        generator = torch.Generator("cpu").manual_seed(check_random_state(self.random_state).randint(2**31 - 1))
        trigonometric = self.features == "trigonometric"
        count = (self._n_features_out + 1) // 2 if trigonometric else self._n_features_out
        noise = coupled_rows(count, x.shape[1], self.coupling, generator)
        rows, log_weights = (noise, torch.zeros_like(noise[:, 0])) if self.proposal is None else self._fitted(noise, x)
        self.random_weights_ = rows.T.numpy()
        self.random_log_weights_ = log_weights.numpy()
        self.random_offset_ = 2 * math.pi * float(torch.rand((), generator=generator, device="cpu"))
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803 - as scikit-learn names it
        """`(n_samples, n_components)`, float32 for float32; cosines first, then sines."""
        check_is_fitted(self)
        x = self._dense(X, reset=False)
        with np.errstate(over="ignore", invalid="ignore"):  # said in words below
            features = self._features(self._centred(x))
        if not np.isfinite(features).all():
            raise checks.overflow(int(np.argmin(np.isfinite(features).all(axis=1))), features.dtype)
        return features

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _checked_components(self) -> int:
        choice("FavorSampler", "kernel", self.kernel, KERNELS)
        choice("FavorSampler", "features", self.features, FEATURES)
        choice("FavorSampler", "coupling", self.coupling, COUPLINGS)
        checks.gamma(self.gamma)
        checks.proposal(self.proposal, self.features)
        return checks.components(self.n_components)

    def _dense(self, given: Any, *, reset: bool) -> Any:
        if issparse(given):
            raise checks.no_sparse(given)
        return validate_data(self, given, dtype=[np.float64, np.float32], reset=reset)

    def _number(self, x: Any) -> float:
        if self.gamma != "scale":
            return float(self.gamma)
        size = float(x.var() if self.kernel == "rbf" else np.square(x).mean())
        return 1 / (x.shape[1] * size) if size else 1.0  # as RBFSampler has it

    def _scale(self) -> float:
        return (2 * self.gamma_ if self.kernel == "rbf" else self.gamma_) ** 0.5

    def _centred(self, x: Any) -> Any:
        return (x - self.mean_.astype(x.dtype)) * x.dtype.type(self._scale())

    def _fitted(self, noise: torch.Tensor, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows from the Gaussian with the least mean log second moment over pairs of training rows, and log weights."""
        u = torch.from_numpy(self._centred(x))
        moment = 2 / len(u) * u.mT @ u  # of u + v: they are independent and centred
        root = shaped(torch.zeros_like(u[:1]), moment[None]).root
        rows = noise[None] @ root.mT
        return rows[0], log_density_ratio(rows, noise[None], root)[0]

    def _features(self, u: Any) -> Any:
        phase = u @ self.random_weights_.astype(u.dtype)
        log_size = self._log_size(u)[:, None]
        if self.features == "positive":
            phase += (self.random_log_weights_ / 2).astype(u.dtype)
            phase += log_size  # before the exponential, so that large terms cancel
            return np.exp(phase, out=phase)
        pairs, alone = divmod(self._n_features_out, 2)
        if alone:  # 2 cos(a + offset) cos(b + offset) is cos(a - b) on average
            phase[:, -1] += u.dtype.type(self.random_offset_)
        features = np.concatenate([np.cos(phase), np.sin(phase[:, :pairs])], axis=1) * np.exp(log_size)
        features[:, pairs : pairs + alone] *= u.dtype.type(math.sqrt(2))
        return features

    def _log_size(self, u: Any) -> Any:
        """The factors of a row, and one over the square root of the number of random rows."""
        half = np.square(u).sum(axis=1) / 2
        mean = (self.mean_ * self._scale()).astype(u.dtype)
        of_kernel = -half if self.kernel == "rbf" else u @ mean + mean @ mean / 2
        of_features = half if self.features == "trigonometric" else -half
        return of_kernel + of_features - u.dtype.type(math.log(self.random_weights_.shape[1]) / 2)


def coupled_rows(count: int, dim: int, coupling: str, generator: torch.Generator) -> torch.Tensor:
    """`[count, dim]`, cut from as many dims as the coupling needs: the same as padding the data with zeros."""
    if coupling == "hadamard":
        drawn = max(HADAMARD_DIM, 1 << (dim - 1).bit_length())
    else:
        drawn = max(2, dim) if coupling == "simplex" else dim
    return gaussian_rows(count, drawn, coupling, generator)[:, :dim]
