"""Memory that nobody wrote must be seen: uninitialised floats are NaN in every test. And compiled code is never old."""

import os
import tempfile

import pytest
import torch
from torch.utils._device import _device_constructors

_device_constructors()  # torch remembers what makes tensors: it must be `torch.empty`, not what replaces it below

# a graph compiled before an operator changed must not be taken for one of now
COMPILED = tempfile.TemporaryDirectory(prefix="subquad-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name

os.environ["HF_HUB_OFFLINE"] = "1"  # tests need no network, and must not wait for one

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("compiler"):
        torch.compiler.reset()  # what other tests compiled counts against a limit
        return  # torch's own machinery may write in place to what it has just made

    def poisoned(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.int8:
                return tensor.fill_(127)  # what rounding left out of outputs
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
