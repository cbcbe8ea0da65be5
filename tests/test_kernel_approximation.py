"""FavorSampler: scikit-learn's contract, means and variances against closed forms, RBFSampler on real data, errors."""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, csr_matrix
from sklearn import datasets
from sklearn.base import clone
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import check_estimator

import subquad
from subquad import errors
from subquad.features.draws import COUPLINGS
from subquad.kernel_approximation import FEATURES, HADAMARD_DIM, KERNELS, FavorSampler, coupled_rows

DIM, GAMMA = 6, 0.1
ROWS = 600 * HADAMARD_DIM  # random rows of one fit: whole blocks of 6 and of 64, and blocks are independent


def cloud(rows: int = 30, dim: int = DIM) -> np.ndarray:
    """Not centred: nothing may depend on that."""
    return 0.5 + np.random.default_rng(0).normal(size=(rows, dim))


def exact(kernel: str, x: np.ndarray, gamma: float = GAMMA) -> np.ndarray:
    return rbf_kernel(x, gamma=gamma) if kernel == "rbf" else np.exp(gamma * x @ x.T)


def estimates(sampler: FavorSampler, x: np.ndarray, block: int, rows: int = ROWS) -> np.ndarray:
    """The kernel of the first two rows of x, estimated by each independent block of random rows alone."""
    count = 2 * rows if sampler.features == "trigonometric" else rows
    first, second = sampler.set_params(n_components=count, random_state=0).fit(x).transform(x[:2])
    products = first * second
    products = products.reshape(2, -1).sum(axis=0) if sampler.features == "trigonometric" else products
    return products.reshape(-1, block).sum(axis=1) * (rows / block)


def block_of(coupling: str, dim: int) -> int:
    return max(dim, HADAMARD_DIM) if coupling == "hadamard" else dim


def standard_error(samples: Any) -> float:
    return float(np.std(samples, ddof=1) / math.sqrt(len(samples)))


def deviation(samples: np.ndarray, expected: float) -> float:
    """Distance of the mean from what it should be, in standard errors."""
    return abs(samples.mean() - expected) / standard_error(samples)


# What scikit-learn asks -----------------------------------------------------------------------------------------------


CONFIGURATIONS = {
    "default": FavorSampler(),
    "positive": FavorSampler(features="positive", coupling="hadamard"),
    "softmax": FavorSampler(kernel="softmax", gamma="scale", coupling="simplex"),
    "softmax, fitted": FavorSampler(kernel="softmax", gamma="scale", features="positive", proposal="fitted"),
}


@pytest.mark.parametrize("sampler", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_estimator_checks(sampler: FavorSampler) -> None:
    results = check_estimator(sampler, on_fail="raise", on_skip=None)
    assert len(results) > 40
    left_out = {result["check_name"] for result in results if result["status"] != "passed"}
    assert left_out <= {"check_array_api_input"}  # runs with SCIPY_ARRAY_API=1 only, for every estimator


def test_parameters_survive() -> None:
    options = {"kernel": "softmax", "gamma": 0.3, "n_components": 8, "features": "positive", "coupling": "iid"}
    sampler = FavorSampler(**options, proposal="fitted", random_state=3)
    copy: Any = clone(sampler)
    assert copy.get_params() == sampler.get_params() == {**options, "proposal": "fitted", "random_state": 3}
    assert repr(FavorSampler(gamma=0.3)) == "FavorSampler(gamma=0.3)"
    fitted = sampler.fit(cloud())
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.transform(cloud()), fitted.transform(cloud()))


def test_names_and_frames() -> None:
    sampler = FavorSampler(n_components=3, random_state=0).set_output(transform="pandas")
    frame = sampler.fit_transform(cloud())
    assert list(frame.columns) == ["favorsampler0", "favorsampler1", "favorsampler2"]
    assert list(sampler.get_feature_names_out()) == list(frame.columns)


def test_draws_are_those_of_the_seed() -> None:
    x = cloud()

    def made(seed: Any) -> np.ndarray:
        return FavorSampler(n_components=7, random_state=seed).fit_transform(x)

    before = made(4)
    torch.manual_seed(1)
    np.random.seed(1)
    assert np.array_equal(made(4), before)
    assert not np.array_equal(made(5), before)
    state = np.random.RandomState(4)
    assert np.array_equal(made(state), before)
    assert not np.array_equal(made(state), before), "the state was not used up"
    assert not np.array_equal(made(None), made(None))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_stays(kernel: str, features: str) -> None:
    x = cloud()
    sampler = FavorSampler(kernel=kernel, features=features, gamma=GAMMA, n_components=101, random_state=0).fit(x)
    low, high = sampler.transform(x.astype(np.float32)), sampler.transform(x)
    assert (low.dtype, high.dtype) == (np.float32, np.float64)
    assert np.abs(low - high).max() < 1e-5 * np.abs(high).max()
    whole = sampler.fit(np.arange(12).reshape(2, 6)).transform(np.arange(12).reshape(2, 6))
    assert whole.dtype == np.float64


def test_circles_become_separable() -> None:
    x, y = datasets.make_circles(300, noise=0.05, factor=0.5, random_state=0)
    alone = LinearSVC().fit(x, y).score(x, y)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), FavorSampler(random_state=0), LinearSVC()),
        {"favorsampler__n_components": np.array([1, 64]), "favorsampler__gamma": ["scale", 1.0]},
        cv=3,
    ).fit(x, y)
    assert alone < 0.7
    assert search.best_params_["favorsampler__n_components"] == 64
    assert search.best_score_ > 0.97


def test_ridge_learns_a_wave() -> None:
    x = np.linspace(-2, 2, 200)[:, None]
    y = np.sin(4 * x[:, 0])
    for options in ({}, {"features": "positive", "proposal": "fitted"}):
        model = make_pipeline(FavorSampler(n_components=200, random_state=0, **options), Ridge(alpha=1e-6)).fit(x, y)
        assert model.score(x, y) > 0.99 > 0.5 > Ridge().fit(x, y).score(x, y)


# What the formulas say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_unbiased(kernel: str, features: str, coupling: str) -> None:
    x = cloud()
    sampler = FavorSampler(kernel=kernel, gamma=GAMMA, features=features, coupling=coupling)
    assert deviation(estimates(sampler, x, block_of(coupling, DIM)), exact(kernel, x)[0, 1]) < 4


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("coupling", "block", "rows"), [("simplex", 2, 6000), ("hadamard", HADAMARD_DIM, ROWS)])
def test_unbiased_in_few_dimensions(features: str, dim: int, coupling: str, block: int, rows: int) -> None:
    """Couplings that need more of them draw in more; Hadamard rows of dim 2 would be off by a fifth here."""
    x = np.zeros((3, dim))
    x[0, 0] = 2.0
    sampler = FavorSampler(gamma=0.5, features=features, coupling=coupling)
    assert deviation(estimates(sampler, x, block, rows), math.exp(-2)) < 4


@pytest.mark.parametrize("dim", [64, 128])
def test_hadamard_rows_of_a_power_of_two_are_orthogonal(dim: int) -> None:
    """They are drawn in just as many dimensions: cut from more, they would not be."""
    rows = coupled_rows(dim, dim, "hadamard", torch.Generator().manual_seed(0)).double()
    products = rows @ rows.mT
    assert float((products - products.diag().diag()).abs().max()) < 1e-4 * float(products.max())


@pytest.mark.parametrize("kernel", KERNELS)
def test_unbiased_if_odd(kernel: str) -> None:
    """The cosine without a sine, among others and alone."""
    x = cloud()
    for count in (1, 3):
        sampler = FavorSampler(kernel=kernel, gamma=GAMMA, n_components=count)
        made = [sampler.set_params(random_state=seed).fit(x).transform(x[:2]) for seed in range(250)]
        assert made[0].shape == (2, count)
        assert deviation(np.array([first @ second for first, second in made]), exact(kernel, x)[0, 1]) < 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["trigonometric", "positive", "fitted"])
def test_variance_is_the_closed_form(kind: str, kernel: str) -> None:
    """Of one independent row, relative to the squared kernel."""
    x = cloud()
    sampler = FavorSampler(kernel=kernel, gamma=GAMMA, features=kind, coupling="iid")
    if kind == "fitted":
        sampler.set_params(features="positive", proposal="fitted")
    relative = estimates(sampler, x, 1) / exact(kernel, x)[0, 1]
    u = math.sqrt(GAMMA * (2 if kernel == "rbf" else 1)) * (x - x.mean(axis=0))
    apart, together = np.square(u[0] - u[1]).sum(), u[0] + u[1]
    if kind == "trigonometric":
        wanted = math.exp(apart) * (1 - math.exp(-apart)) ** 2 / 2
    elif kind == "positive":
        wanted = math.expm1(np.square(together).sum())
    else:
        values, vectors = np.linalg.eigh(2 * u.T @ u / len(u))
        t = ((1 + 2 * values) + np.sqrt((1 + 2 * values) ** 2 + 8 * values)) / 2
        wanted = np.prod((1 + t) / 2 / np.sqrt(t) * np.exp(np.square(together @ vectors) / t)) - 1
    assert deviation(np.square(relative - 1), float(wanted)) < 4


@pytest.mark.parametrize(
    ("features", "coupling", "dim", "rows"),
    [
        ("trigonometric", "orthogonal", DIM, ROWS),
        ("positive", "orthogonal", DIM, 4 * ROWS),  # the smallest gain
        ("positive", "simplex", DIM, ROWS),
        ("trigonometric", "hadamard", HADAMARD_DIM, ROWS),
    ],
)
def test_coupled_rows_vary_less(features: str, coupling: str, dim: int, rows: int) -> None:
    """Blocks of coupled rows against blocks as large of independent ones."""
    x = cloud(dim=dim)
    truth = exact("rbf", x, 0.3 / dim)[0, 1]
    squares = [
        np.square(estimates(FavorSampler(gamma=0.3 / dim, features=features, coupling=c), x, dim, rows) - truth)
        for c in (coupling, "iid")
    ]
    coupled, independent = (sample.mean() for sample in squares)
    assert independent - coupled > 4 * math.hypot(*map(standard_error, squares))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_its_own_kernel(kernel: str) -> None:
    """cos^2 + sin^2 = 1: trigonometric features are exact on the diagonal."""
    x = cloud()
    for coupling in COUPLINGS:
        made = FavorSampler(kernel=kernel, gamma=GAMMA, n_components=10, coupling=coupling).fit_transform(x)
        assert np.abs(np.square(made).sum(axis=1) / np.diag(exact(kernel, x)) - 1).max() < 1e-13


@pytest.mark.parametrize("kernel", KERNELS)
def test_positive_features_are_positive(kernel: str) -> None:
    options = {"kernel": kernel, "gamma": GAMMA, "features": "positive"}
    assert FavorSampler(**options).fit_transform(cloud()).min() > 0
    assert FavorSampler(**options, proposal="fitted").fit_transform(cloud()).min() > 0


@pytest.mark.parametrize("features", FEATURES)
def test_moving_all_data_changes_nothing(features: str) -> None:
    """The Gaussian kernel compares; positive features of data far from the origin would vanish."""
    x = cloud()
    sampler = FavorSampler(gamma=GAMMA, features=features, random_state=0)
    assert np.abs(sampler.fit_transform(x + 1000) - sampler.fit_transform(x)).max() < 1e-9


def test_large_terms_cancel_before_the_exponential() -> None:
    """exp(w.u) alone is infinite here, and exp(-|u|^2) zero."""
    x = np.array([[300.0], [-300.0]], dtype=np.float32)
    sampler = FavorSampler(gamma=0.5, features="positive", n_components=200, random_state=0).fit(x)
    assert np.abs(sampler.random_weights_).max() * 300 > math.log(np.finfo(np.float32).max)
    assert not sampler.transform(x).any()
    near = np.array([[1.0], [-1.0]], dtype=np.float32)
    assert np.isfinite(sampler.transform(near)).all()


@pytest.mark.parametrize("x", [cloud(), np.ones((3, 2))], ids=["cloud", "constant"])
def test_gamma_follows_the_data(x: np.ndarray) -> None:
    ours, theirs = FavorSampler(gamma="scale").fit(x), RBFSampler().set_params(gamma="scale").fit(x)
    assert ours.gamma_ == pytest.approx(theirs._gamma, rel=1e-14)
    softmax = FavorSampler(kernel="softmax", gamma="scale").fit(x)
    assert softmax.gamma_ * np.square(x).sum(axis=1).mean() == pytest.approx(1, rel=1e-14)
    assert FavorSampler(kernel="softmax", gamma="scale").fit(0 * x).gamma_ == 1


# On real data ---------------------------------------------------------------------------------------------------------


DATA = {
    "digits": datasets.load_digits,
    "breast cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
}


def real(name: str) -> np.ndarray:
    """300 rows; pixels as they are, measurements standardised."""
    load: Any = DATA[name]
    x = load().data[:300]
    return x if name == "digits" else StandardScaler().fit_transform(x)


def kernel_errors(sampler: Any, x: np.ndarray, draws: int = 12) -> np.ndarray:
    """|estimate - K| / |K| (Frobenius) of each draw; gamma is 1 / (n_features var)."""
    truth = exact("rbf", x, 1 / (x.shape[1] * x.var()))
    found = []
    for seed in range(draws):
        phi = sampler.set_params(gamma="scale", random_state=seed).fit_transform(x)
        found.append(np.linalg.norm(phi @ phi.T - truth) / np.linalg.norm(truth))
    return np.array(found)


def clearly_below(low: np.ndarray, high: np.ndarray) -> bool:
    return high.mean() - low.mean() > 4 * math.hypot(standard_error(low), standard_error(high))


@pytest.mark.parametrize("name", DATA)
def test_better_than_rbf_sampler(name: str) -> None:
    x = real(name)
    assert clearly_below(
        kernel_errors(FavorSampler(n_components=256), x), kernel_errors(RBFSampler(n_components=256), x)
    )


def test_fitted_rows_are_better() -> None:
    """In logarithms: a few draws without a fit are off by far more than the rest."""
    x = real("digits")
    plain = FavorSampler(n_components=256, features="positive")
    fitted = FavorSampler(n_components=256, features="positive", proposal="fitted")
    assert clearly_below(np.log(kernel_errors(fitted, x)), np.log(kernel_errors(plain, x)))


@pytest.mark.parametrize(
    "options", [{}, {"features": "positive", "proposal": "fitted"}], ids=["trigonometric", "fitted"]
)
def test_error_falls_with_features(options: dict) -> None:
    x = real("digits")
    few, more, many = (kernel_errors(FavorSampler(n_components=n, **options), x) for n in (64, 256, 1024))
    assert clearly_below(more, few)
    assert clearly_below(many, more)


# Errors ---------------------------------------------------------------------------------------------------------------


def fit(**options: Any) -> Callable[[], object]:
    return lambda: FavorSampler(**options).fit(cloud())


GAMMAS = "FavorSampler: gamma must be 'scale' or a positive finite number, got"
SPARSE = "FavorSampler: takes dense arrays only, as its features are dense; got a sparse {}; use X.toarray()"
ERRORS = {
    "zero gamma": (fit(gamma=0), errors.ConfigError, f"{GAMMAS} 0"),
    "negative gamma": (fit(gamma=-1.0), errors.ConfigError, f"{GAMMAS} -1.0"),
    "infinite gamma": (fit(gamma=math.inf), errors.ConfigError, f"{GAMMAS} inf"),
    "no number": (fit(gamma=math.nan), errors.ConfigError, f"{GAMMAS} nan"),
    "gamma of SVC": (fit(gamma="auto"), errors.ConfigError, f"{GAMMAS} 'auto'"),
    "true gamma": (fit(gamma=True), errors.ConfigError, f"{GAMMAS} True"),
    "no components": (
        fit(n_components=0),
        errors.ConfigError,
        "FavorSampler: n_components must be a whole number of at least 1, got 0",
    ),
    "half a component": (
        fit(n_components=2.5),
        errors.ConfigError,
        "FavorSampler: n_components must be a whole number of at least 1, got 2.5",
    ),
    "true components": (
        fit(n_components=True),
        errors.ConfigError,
        "FavorSampler: n_components must be a whole number of at least 1, got True",
    ),
    "kernel": (
        fit(kernel="gaussian"),
        errors.ConfigError,
        "FavorSampler: kernel must be one of rbf, softmax, got 'gaussian'",
    ),
    "features": (
        fit(features="trig"),
        errors.ConfigError,
        "FavorSampler: features must be one of trigonometric, positive, got 'trig' (did you mean 'trigonometric'?)",
    ),
    "coupling": (
        fit(coupling="haar"),
        errors.ConfigError,
        "FavorSampler: coupling must be one of iid, orthogonal, simplex, hadamard, got 'haar' "
        "(did you mean 'hadamard'?)",
    ),
    "proposal": (
        fit(proposal="sharp"),
        errors.ConfigError,
        "FavorSampler: proposal must be None or 'fitted', got 'sharp'",
    ),
    "proposal of frequencies": (
        fit(proposal="fitted"),
        errors.ConfigError,
        "FavorSampler: proposal='fitted' needs features='positive', got 'trigonometric'",
    ),
    "sparse matrix": (
        lambda: FavorSampler().fit(csr_matrix(cloud())),
        errors.DtypeError,
        SPARSE.format("csr_matrix"),
    ),
    "sparse later": (
        lambda: FavorSampler().fit(cloud()).transform(csr_array(cloud())),
        errors.DtypeError,
        SPARSE.format("csr_array"),
    ),
    "overflow": (
        lambda: FavorSampler(kernel="softmax").fit([[0.0], [1.0]]).transform([[1.0], [40.0]]),
        errors.DataError,
        "FavorSampler: the features of row 1 are beyond float64; scale the data down or lower gamma",
    ),
    "overflow of float32": (
        lambda: FavorSampler(kernel="softmax").fit([[0.0], [1.0]]).transform(np.array([[20.0]], dtype=np.float32)),
        errors.DataError,
        "FavorSampler: the features of row 0 are beyond float32; scale the data down, lower gamma or pass float64",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], object], kind: type, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_says_that_it_needs_scikit_learn(tmp_path: Path) -> None:
    """And scikit-learn alone: subquad works without."""
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')")
    path = os.pathsep.join([str(tmp_path), str(Path(subquad.__file__).parent.parent)])
    program = "import subquad, subquad.nn; import subquad.kernel_approximation"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr.splitlines()[-1] == (
        "subquad.errors.ConfigError: subquad.kernel_approximation: needs the package 'scikit-learn>=1.6'; "
        "pip install 'scikit-learn>=1.6'"
    )
