"""What compilers are told about our operators: sizes, dtypes and strides of what they return, without running them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fitted import fitted
from subquad import ClusterAttention, FavorAttention, LinearAttention, Mechanism, WindowAttention
from subquad.testing import make_inputs

D = 6


def looks(result: Any) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.dtype, t.stride()) for t in tree_leaves(result) if isinstance(t, Tensor)]


class Foretold(TorchDispatchMode):
    """Compares every result of our operators with what their fakes say of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "subquad":
            fakes = FakeTensorMode()
            given = tree_map_only(Tensor, lambda t: fakes.from_tensor(t.detach()), args)
            with fakes:
                foretold = function(*given)
            assert looks(foretold) == looks(result), function
            self.seen.add(function._opname)
        return result


MECHANISMS: dict[str, tuple[Callable[[], Mechanism], str]] = {
    "favor": (lambda: FavorAttention(D, 8, near=4, sinks=2, backend="torch"), "favor"),
    "favor, native": (lambda: FavorAttention(D, 8, near=4, sinks=2, backend="cpu"), "favor"),
    "favor of features only": (lambda: FavorAttention(D, 8, near=0, sinks=0, chunk=4, backend="torch"), "favor"),
    "favor, learned": (lambda: fitted(FavorAttention, D, 8, estimator="hedgehog", near=4), "favor"),
    "linear": (lambda: LinearAttention(D, chunk=4, backend="torch"), "linear"),
    "linear, native": (lambda: LinearAttention(D, num_features=9, backend="cpu"), "linear"),
    "cluster": (lambda: ClusterAttention(D, num_clusters=3, bucket_size=4), "bucket"),
    "window": (lambda: WindowAttention(D, window=4), "sparse"),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("make", "operator"), MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fakes_look_like_results(
    make: Callable[[], Mechanism], operator: str, causal: bool, dtype: torch.dtype
) -> None:
    mechanism = make()
    inputs = make_inputs(mechanism, 13, batch=2).to(dtype).leaves()
    with Foretold() as foretold:
        out = mechanism(*inputs, causal=causal)
        parameters = [p for p in mechanism.parameters() if p.requires_grad]
        torch.autograd.grad(out.float().sum(), [*inputs, *parameters])
    assert foretold.seen == {f"{operator}_forward", f"{operator}_backward"}
