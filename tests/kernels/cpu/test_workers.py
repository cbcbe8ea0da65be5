"""Threads of the native engine: the same results however work is cut up, also after a fork; errors, no crashes."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.kernels.cpu import library
from subquad.testing import assert_close
from threads import threads

pytestmark = pytest.mark.skipif(not library.AVAILABLE, reason=library.WHY_MISSING)

MECHANISMS = {
    "favor": FavorAttention(64, 256, backend="cpu"),
    "favor, near=0": FavorAttention(64, 256, near=0, sinks=0, backend="cpu"),
    "learned": FavorAttention(64, 128, estimator="hedgehog", backend="cpu"),
    "linear": LinearAttention(64, backend="cpu"),
}


def draw(heads: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, 64, generator=generator).requires_grad_() for _ in range(3)]


def run(mechanism: Mechanism, inputs: list[Tensor], causal: bool) -> list[Tensor]:
    out = mechanism(*inputs, causal=causal)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def with_threads(count: int, mechanism: Mechanism, inputs: list[Tensor], causal: bool) -> list[Tensor]:
    with threads(count):
        return run(mechanism, inputs, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_portions_of_heads_are_the_whole(name: str, causal: bool) -> None:
    """Few heads are done in portions, by whoever is free; three threads cut two heads up once more."""
    inputs = draw(heads=2, length=5000 if name != "linear" else 9000)
    whole = with_threads(1, MECHANISMS[name], inputs, causal)
    for count, tolerance in ((2, 1e-6), (3, 1e-5)):  # parts of heads are merged with a rounding more
        results = [with_threads(count, MECHANISMS[name], inputs, causal) for _ in range(2)]
        for what, once, again, want in zip(("out", "dq", "dk", "dv"), *results, whole, strict=True):
            assert torch.equal(once, again), f"{what} depends on who was first"
            assert_close(once, want, tolerance, f"{what}, {count} threads")


def test_calls_from_many_threads() -> None:
    """Jobs of several callers share the workers; each gets its own result."""
    inputs = {name: draw(2, 3000) for name in MECHANISMS}
    with threads(2):
        want = {name: run(MECHANISMS[name], inputs[name], True) for name in MECHANISMS}
        with ThreadPoolExecutor(6) as callers:
            calls = [(name, callers.submit(run, MECHANISMS[name], inputs[name], True)) for name in [*MECHANISMS] * 3]
            for name, call in calls:
                assert all(map(torch.equal, call.result(), want[name])), name


def child(program: str) -> str:
    """What it printed. The time limit only ends a child that hangs."""
    source = str(Path(library.__file__).parents[3])
    begin = f"import sys; sys.path.insert(0, {source!r}); import torch; torch.set_num_threads(2)\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + program], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_has_workers_of_its_own() -> None:
    program = """
import os
from subquad import FavorAttention
attention, x = FavorAttention(8, 32, backend="cpu"), torch.randn(1, 8, 300, 8)
want = attention(x, x, x, causal=True)
child = os.fork()
same = torch.equal(attention(x, x, x, causal=True), want)
if child:
    _, status = os.waitpid(child, 0)
    print(same, status)
else:
    os._exit(0 if same else 1)
"""
    assert child(program) == "True 0\n"


def test_no_memory_is_an_error() -> None:
    """Blocks of a million keys need logits of gigabytes."""
    program = """
import resource
from subquad import FavorAttention, SubquadError
x = torch.randn(1, 2, 1 << 20, 8)
attention = FavorAttention(8, 16, near=1 << 20, backend="cpu")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), used + (1 << 29)))
try:
    attention(x, x, x, causal=True)
except SubquadError as error:
    print(error)
print(bool(attention(*[x[:, :, :50]] * 3, causal=True).isfinite().all()))
"""
    assert child(program) == (
        "subquad: the native engine stopped because there is not enough memory; "
        "use fewer or shorter sequences, or backend='torch'\nTrue\n"
    )


PARALLEL_FROM = 32_768  # numbers: torch's operations of fewer run on one thread
NOTHING_TO_COMPUTE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::to", "aten::slice", "aten::as_strided")


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_call_wakes_threads_of_torch(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They spin for milliseconds after an operation, on the cores that the engine's own threads want."""
    monkeypatch.undo()  # filling empty tensors with NaN is such an operation
    q, k, v = draw(heads=8, length=600)
    grad = torch.ones_like(q)
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.autograd.grad(MECHANISMS[name](q, k, v, causal=causal), (q, k, v), grad)
    sizes = {
        event.name: max((math.prod(shape) for shape in event.input_shapes if shape), default=0)
        for event in profile.events() or ()
        if event.name.startswith("aten::") and event.name not in NOTHING_TO_COMPUTE
    }
    assert sizes, "nothing was recorded"
    assert {name: size for name, size in sizes.items() if size >= PARALLEL_FROM} == {}
