"""FavorSampler and RBFSampler at equal numbers of features: error of the kernel, and what models make of it.

    python benchmarks/kernel_approximation.py

Data come with scikit-learn. gamma is "scale". The error is |estimate - K| / |K| (Frobenius) on 400 rows.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from rich.progress import Progress
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.kernel_approximation import RBFSampler
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC

from subquad.files import save_figure, write_text
from subquad.kernel_approximation import FavorSampler

RESULTS = Path(__file__).parent / "results"
ROWS = 400
DATA = {
    "digits": datasets.load_digits,
    "breast cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
}
METHODS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "RBFSampler": (RBFSampler, {}),
    "trigonometric, iid": (FavorSampler, {"coupling": "iid"}),
    "trigonometric, orthogonal": (FavorSampler, {}),
    "positive, iid": (FavorSampler, {"features": "positive", "coupling": "iid"}),
    "positive, orthogonal": (FavorSampler, {"features": "positive"}),
    "positive, simplex, fitted": (FavorSampler, {"features": "positive", "coupling": "simplex", "proposal": "fitted"}),
}
COMPONENTS = (32, 64, 128, 256, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description="FavorSampler against RBFSampler on real data.")
    parser.add_argument("--components", type=int, nargs="+", default=COMPONENTS, help="numbers of features")
    parser.add_argument("--model-components", type=int, default=256, help="features of the models")
    parser.add_argument("--draws", type=int, default=20, help="random draws; models: as many random halves of the data")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for kernel_approximation.json and .png")
    options = parser.parse_args()
    if not options.output.is_dir():
        parser.error(f"--output: there is no folder {options.output}")
    if options.draws < 2 or min(options.components) < 1 or options.model_components < 1:
        parser.error("there must be at least two draws and one feature")
    kernels, softmax, models = {}, {}, {}
    with Progress() as progress:
        task = progress.add_task("kernels and models", total=2 * len(DATA) * len(METHODS))
        for name in DATA:
            x, y = real(name)
            kernels[name], softmax[name], models[name] = {}, {}, baselines(name, x, y, options.draws)
            for method in METHODS:
                progress.update(task, description=f"{name}: {method}")
                rows = {str(n): kernel_errors(method, n, x[:ROWS], options.draws) for n in options.components}
                kernels[name][method] = rows
                if method != "RBFSampler":
                    count = options.model_components
                    softmax[name][method] = kernel_errors(method, count, x[:ROWS], options.draws, kernel="softmax")
                progress.advance(task)
                models[name][method] = scores(name, x, y, options.draws, method, options.model_components)
                progress.advance(task)
    about = {"rows": ROWS, "draws": options.draws, "model_components": options.model_components}
    about |= {"scikit-learn": sklearn.__version__, "torch": torch.__version__}
    report = {**about, "kernel_error": kernels, "softmax_kernel_error": softmax, "score": models}
    write_text(options.output / "kernel_approximation.json", json.dumps(report, indent=1) + "\n")
    plot(kernels, options.output / "kernel_approximation.png", options.draws)
    show(report)


def real(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows in random order; pixels as they are, measurements standardised."""
    load: Any = DATA[name]
    x, y = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x if name == "digits" else StandardScaler().fit_transform(x))[order], y[order]


def sampler(method: str, components: int, seed: int, **more: str) -> Any:
    kind, options = METHODS[method]
    return kind(gamma="scale", n_components=components, random_state=seed, **options, **more)


def kernel_errors(method: str, components: int, x: np.ndarray, draws: int, **more: str) -> dict[str, float]:
    if more.get("kernel") == "softmax":
        exact = np.exp(x @ x.T / (x.shape[1] * np.square(x).mean()))
    else:
        exact = rbf_kernel(x, gamma=1 / (x.shape[1] * x.var()))
    found = []
    for seed in range(draws):
        phi = sampler(method, components, seed, **more).fit_transform(x)
        found.append(np.linalg.norm(phi @ phi.T - exact) / np.linalg.norm(exact))
    return summary(found)


def linear_model(name: str) -> Any:
    return Ridge(alpha=1.0) if name == "diabetes" else LinearSVC(C=10.0, max_iter=20_000)


def scores(name: str, x: np.ndarray, y: np.ndarray, draws: int, method: str, components: int) -> dict[str, float]:
    """Held-out accuracy, R^2 for diabetes, of a linear model on the features."""
    return held_out(lambda seed: make_pipeline(sampler(method, components, seed), linear_model(name)), x, y, draws)


def baselines(name: str, x: np.ndarray, y: np.ndarray, draws: int) -> dict[str, dict[str, float]]:
    """The linear model on the data themselves, and the machine with the exact kernel."""
    exact: Any = SVC(C=10.0, gamma="scale")
    if name == "diabetes":  # targets lose their mean, as Ridge has an intercept
        machine = KernelRidge(alpha=1, kernel="rbf", gamma=1 / (x.shape[1] * x.var()))
        exact = TransformedTargetRegressor(machine, transformer=StandardScaler(with_std=False))
    return {
        "no features": held_out(lambda _: linear_model(name), x, y, draws),
        "exact kernel": held_out(lambda _: exact, x, y, draws),
    }


def held_out(make: Callable[[int], Any], x: np.ndarray, y: np.ndarray, draws: int) -> dict[str, float]:
    """Every method sees the same halves."""
    found = []
    for seed in range(draws):
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.5, random_state=seed)
        found.append(make(seed).fit(x_train, y_train).score(x_test, y_test))
    return summary(found)


def summary(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "standard_error": float(np.std(values, ddof=1) / len(values) ** 0.5)}


def show(report: dict[str, Any]) -> None:
    """Tables as in docs/kernel_approximation.md."""
    count = str(report["model_components"])
    for title in ("kernel_error", "softmax_kernel_error", "score"):
        table = report[title]
        print(f"\n| {title} | {' | '.join(table)} |\n|{'---|' * (len(table) + 1)}")
        for method in next(iter(table.values())):
            cells = [row[method].get(count) if title == "kernel_error" else row[method] for row in table.values()]
            shown = (f"{cell['mean']:.3f} ± {cell['standard_error']:.3f}" if cell else "" for cell in cells)
            print(f"| {method} | {' | '.join(shown)} |")


def plot(kernels: dict[str, Any], path: Path, draws: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = figure.subplots(1, len(kernels), sharey=True)
    looks = {
        "RBFSampler": ("black", ":", "x"),
        "trigonometric, iid": ("tab:blue", "--", "o"),
        "trigonometric, orthogonal": ("tab:blue", "-", "o"),
        "positive, iid": ("tab:red", "--", "s"),
        "positive, orthogonal": ("tab:red", "-", "s"),
        "positive, simplex, fitted": ("tab:green", "-", "^"),
    }
    counts = [int(n) for n in kernels["digits"]["RBFSampler"]]
    for axes, (name, methods) in zip(panels, kernels.items(), strict=True):
        for method, rows in methods.items():
            color, line, marker = looks[method]
            means, errors = ([row[key] for row in rows.values()] for key in ("mean", "standard_error"))
            style = {"color": color, "linestyle": line, "marker": marker, "markersize": 4, "capsize": 2}
            axes.errorbar(counts, means, yerr=errors, label=method, **style)
        axes.set(title=name, xlabel="number of features", xscale="log", yscale="log")
        axes.set_xticks(counts, [f"{n:,}" for n in counts])
        axes.minorticks_off()
        axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("|estimate - K| / |K|")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize="small")
    figure.suptitle(f"Error of the Gaussian kernel: mean and standard error of {draws} draws")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
