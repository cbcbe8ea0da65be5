"""Every mechanism, in the configurations that take different paths, against the whole contract.

The torch engine in all precisions; `kernels/test_cpu.py` does the same for the C++ engine.
"""

import torch

from fitted import fitted
from subquad import FavorAttention, IdentityAttention, LinearAttention, Mechanism, PagesAttention, SoftmaxAttention
from subquad.testing import Check, parametrize_contract

D = 6


def signed_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.relu(), (-x).relu()], dim=-1)


class PerQueryHead(FavorAttention):
    """A draw for every query head, where two of them share a key head."""

    key_heads = 2


@parametrize_contract(
    {
        "softmax": lambda: SoftmaxAttention(D),
        "softmax-scale": lambda: SoftmaxAttention(D, scale=0.7),
        "identity": lambda: IdentityAttention(D),
        "linear": lambda: LinearAttention(D, backend="torch"),
        "linear-relu-projected": lambda: LinearAttention(
            D, backend="torch", feature_map="relu", num_features=12, num_heads=2
        ),
        "linear-softplus": lambda: LinearAttention(D, backend="torch", feature_map="softplus"),
        "linear-relu2": lambda: LinearAttention(
            D, backend="torch", feature_map="relu2", num_features=9, coupling="iid"
        ),
        "linear-exp": lambda: LinearAttention(D, backend="torch", feature_map="exp"),
        "linear-function": lambda: LinearAttention(D, backend="torch", feature_map=signed_relu),
        "favor": lambda: FavorAttention(D, 16, backend="torch", near=8, sinks=2),
        "favor-paper": lambda: FavorAttention(D, 16, backend="torch", near=0, sinks=0),
        "favor-paper-per-head": lambda: FavorAttention(
            D, 16, backend="torch", near=0, sinks=0, num_heads=2, coupling="iid"
        ),
        "favor-sinks": lambda: FavorAttention(D, 16, backend="torch", near=0, sinks=3),
        "favor-near": lambda: FavorAttention(D, 16, backend="torch", near=5, sinks=0, estimator="hyperbolic"),
        "favor-more-sinks-than-near": lambda: FavorAttention(D, 16, backend="torch", near=4, sinks=9, num_heads=3),
        "favor-all-near": lambda: FavorAttention(D, 16, backend="torch", near=200, sinks=1),
        "favor-reach": lambda: FavorAttention(D, 16, backend="torch", near=3, reach=4, sinks=2),
        "favor-reach-alone": lambda: FavorAttention(
            D, 16, backend="torch", near=1, reach=5, sinks=0, kernel="gaussian", num_heads=2
        ),
        "favor-reach-past-the-end": lambda: FavorAttention(D, 16, backend="torch", near=8, reach=30, sinks=9),
        "favor-reach-per-query-head": lambda: PerQueryHead(
            D, 16, backend="torch", near=4, reach=2, sinks=7, num_heads=4
        ),
        "favor-reach-hedgehog": lambda: fitted(
            FavorAttention, D, 16, estimator="hedgehog", backend="torch", near=4, reach=3, sinks=2, num_heads=2
        ),
        "favor-window": lambda: FavorAttention(D, 16, backend="torch", near=4, reach=3, sinks=2, far=False),
        "favor-window-gaussian": lambda: FavorAttention(
            D, 16, backend="torch", near=7, sinks=0, far=False, kernel="gaussian"
        ),
        "favor-sinks-alone": lambda: FavorAttention(D, 16, backend="torch", near=0, sinks=3, far=False),
        "favor-window-hedgehog": lambda: fitted(
            PerQueryHead, D, 16, estimator="hedgehog", backend="torch", near=4, sinks=1, num_heads=4, far=False
        ),
        "favor-gaussian": lambda: FavorAttention(D, 16, backend="torch", near=8, sinks=2, kernel="gaussian"),
        "favor-gaussian-paper": lambda: FavorAttention(
            D, 16, backend="torch", near=0, sinks=0, kernel="gaussian", scale=0.5
        ),
        "favor-trigonometric-per-query-head": lambda: PerQueryHead(
            D, 16, backend="torch", near=0, sinks=0, estimator="trigonometric", num_heads=4
        ),
        "favor-per-query-head": lambda: PerQueryHead(D, 16, backend="torch", near=8, sinks=2, num_heads=4),
        "favor-optimal": lambda: fitted(FavorAttention, D, 16, estimator="optimal", backend="torch", near=0, sinks=0),
        "favor-sharp": lambda: fitted(
            FavorAttention, D, 16, estimator="sharp", backend="torch", near=8, sinks=2, coupling="simplex"
        ),
        "favor-calibrated": lambda: fitted(
            FavorAttention, D, 16, estimator="calibrated", backend="torch", near=8, sinks=2, num_heads=2
        ),
        "favor-calibrated-transform": lambda: fitted(
            FavorAttention, D, 16, estimator="calibrated", backend="torch", near=8, sinks=2, transform=True
        ),
        "favor-hedgehog": lambda: fitted(
            FavorAttention, D, 16, estimator="hedgehog", backend="torch", near=8, sinks=2, num_heads=2
        ),
        "favor-hedgehog-per-query-head": lambda: fitted(
            PerQueryHead, D, 16, estimator="hedgehog", backend="torch", near=8, sinks=0, num_heads=4
        ),
        "favor-hedgehog-paper": lambda: fitted(
            FavorAttention, D, 16, estimator="hedgehog", backend="torch", near=0, sinks=0
        ),
        "favor-exponential": lambda: fitted(
            FavorAttention, D, 16, estimator="exponential", backend="torch", near=8, sinks=2, num_heads=2
        ),
        "favor-trigonometric": lambda: FavorAttention(
            D, 16, backend="torch", near=0, sinks=0, estimator="trigonometric"
        ),
        "favor-trigonometric-gaussian": lambda: FavorAttention(
            D, 16, backend="torch", near=0, sinks=0, estimator="trigonometric", kernel="gaussian", num_heads=2
        ),
        "pages": lambda: PagesAttention(D, 2, page=4, window=8, sinks=2),
        "pages-one-of-one": lambda: PagesAttention(D, 1, page=1, window=0, sinks=0, scale=0.7),
        "pages-odd": lambda: PagesAttention(D, 3, page=3, window=3, sinks=5),
        "pages-none": lambda: PagesAttention(D, 0, page=4, window=4, sinks=1),
        "pages-all": lambda: PagesAttention(D, 100, page=2, window=2, sinks=0),
        "pages-one-page": lambda: PagesAttention(D, 2, page=40, window=0, sinks=3),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)
