"""The table of engines: who is chosen, why not, and how another one is added."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.errors import ConfigError
from subquad.kernels import engines
from subquad.kernels.engines import ENGINES, Engine
from subquad.kernels.favor import torch as favor_torch
from subquad.kernels.linear import torch as linear_torch
from subquad.testing import assert_close, make_inputs

SIGNED = "it has no signed (trigonometric) features"


def counted(module: Any, calls: list[str]) -> Any:
    """An engine that is another one, and tells when it is called."""

    def forward(inputs: Any, options: Any) -> Any:
        calls.append("forward")
        return module.forward(inputs, options)

    def backward(*args: Any) -> Any:
        calls.append("backward")
        return module.backward(*args)

    return SimpleNamespace(border_count=module.border_count, forward=forward, backward=backward)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine "stub" was asked, which stands in the table behind all others."""
    made: list[str] = []
    operations = {"favor": counted(favor_torch, made), "linear": counted(linear_torch, made)}
    monkeypatch.setitem(ENGINES, "stub", Engine("stub", operations, dtypes=(torch.float64,), near=False))
    return made


@pytest.mark.parametrize(
    "make",
    [lambda backend: FavorAttention(6, near=0, sinks=2, backend=backend), lambda b: LinearAttention(6, backend=b)],
)
def test_another_engine_is_a_line_in_the_table(make: Any, calls: list[str]) -> None:
    ours, theirs = make("stub"), make("torch")
    inputs = make_inputs(ours, 20).leaves()
    got, want = (mechanism(*inputs, causal=True) for mechanism in (ours, theirs))
    assert calls == ["forward"]
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in (got, want)]
    assert calls == ["forward", "backward"]
    assert all(torch.equal(g, w) for g, w in zip(*gradients, strict=True))
    assert torch.equal(got, want)
    with torch.no_grad():  # it has no steps of its own: torch operations decode
        state, outs = None, []
        for t in range(20):
            q, k, v = (x[:, :, t : t + 1] for x in inputs)
            out, state = ours.extend(q, k, v, state)
            outs.append(out)
    assert_close(torch.cat(outs, 2), want, 1e-12)


def refusal(mechanism: Mechanism, dtype: torch.dtype) -> str:
    with pytest.raises(ConfigError) as caught:
        mechanism(*make_inputs(mechanism, 9).to(dtype))
    return str(caught.value)


def test_it_says_what_it_cannot_do(calls: list[str]) -> None:
    advice = "backend='auto' falls back to torch"
    words = "favor: backend='stub' cannot be used: it takes float64, and the tensors are float32"
    assert refusal(FavorAttention(6, backend="stub"), torch.float32) == f"{words}; {advice}"
    words = "favor: backend='stub' cannot be used: it has no near blocks"
    assert refusal(FavorAttention(6, backend="stub"), torch.float64) == f"{words}; {advice}"
    assert calls == []


@pytest.mark.parametrize(
    ("engine", "needs", "reason"),
    [
        (Engine("x", {}), {}, "it has no favor attention"),
        (Engine("x", {}, missing="there is no such machine"), {}, "there is no such machine"),
        (Engine("x", {"favor": favor_torch}, devices=("cuda",)), {}, "the tensors are on cpu"),
        (
            Engine("x", {"favor": favor_torch}, signed=False),
            {"signed": True},
            "it has no signed (trigonometric) features",
        ),
        (Engine("x", {"favor": favor_torch}, gradients=False), {"gradients": True}, "it has no gradients"),
        (Engine("x", {"favor": favor_torch}), {"near": True, "signed": True, "gradients": True}, None),
        (Engine("x", {"favor": favor_torch}, devices=("cpu",)), {}, None),
    ],
)
def test_obstacles(engine: Engine, needs: dict[str, bool], reason: str | None) -> None:
    all_needs = {"near": False, "signed": False, "gradients": False} | needs
    assert engine.obstacle("favor", torch.zeros(1, 1, 1, 1), **all_needs) == reason


def test_auto_takes_the_first_that_can(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    native = "torch" if ENGINES["cpu"].missing else "cpu"
    assert engines.choose("favor", "auto", single).name == native
    assert engines.choose("favor", "auto", double).name == "torch"
    monkeypatch.delitem(ENGINES, "torch")
    assert engines.choose("favor", "auto", double).name == "stub"


def test_a_backend_that_is_in_no_table() -> None:
    with pytest.raises(ConfigError) as caught:
        LinearAttention(6, backend="tpu")
    assert str(caught.value) == "linear: backend must be one of auto, cpu, torch, got 'tpu' (did you mean 'cpu'?)"
