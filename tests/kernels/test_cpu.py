"""The C++ engine against the whole contract, and against the torch engine where the contract does not reach."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fitted import fitted
from sanitizers import sanitized_environment
from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.errors import ConfigError
from subquad.features import draw_feature_map
from subquad.functional import linear_attention
from subquad.kernels import engines
from subquad.kernels.cpu import build, library
from subquad.kernels.favor.inputs import FavorOptions
from subquad.kernels.favor.operator import favor_attention
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract, relative_error
from subquad.testing.inputs import gradients
from threads import threads

D = 6


def to_single(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.float() if t.dtype == torch.float64 else t for t in tensors]


class InSingle:
    """Computes in float32, by the C++ engine, what comes in float64."""

    rounding = 1e-5
    float32_floor = 3e-7  # what its exp is good to, see simd.hpp

    def forward(self: Any, *qkv: Tensor, **options: Any) -> Tensor:
        return super().forward(*to_single(qkv), **options).to(qkv[0].dtype)  # pyright: ignore

    def extend(self: Any, q: Tensor, k: Tensor, v: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        out, state = super().extend(*to_single((q, k, v)), state, **options)  # pyright: ignore
        return out.to(q.dtype), state


class NativeFavor(InSingle, FavorAttention):
    pass


class NativeLinear(InSingle, LinearAttention):
    pass


class PerQueryHead(NativeFavor):
    key_heads = 2


@parametrize_contract(
    {
        "linear": lambda: NativeLinear(D, backend="cpu"),
        "linear-relu-projected": lambda: NativeLinear(
            D, feature_map="relu", num_features=12, num_heads=2, backend="cpu"
        ),
        "linear-softplus": lambda: NativeLinear(D, feature_map="softplus", backend="cpu"),
        "linear-relu2": lambda: NativeLinear(D, feature_map="relu2", num_features=9, coupling="iid", backend="cpu"),
        "linear-exp": lambda: NativeLinear(D, feature_map="exp", backend="cpu"),
        "linear-whole-vectors": lambda: NativeLinear(16, backend="cpu"),  # read where they lie
        "favor-whole-vectors": lambda: NativeFavor(16, 48, near=8, sinks=2, backend="cpu"),
        "favor": lambda: NativeFavor(D, 16, near=8, sinks=2, backend="cpu"),
        "favor-paper": lambda: NativeFavor(D, 16, near=0, sinks=0, backend="cpu"),
        "favor-sinks": lambda: NativeFavor(D, 16, near=0, sinks=3, num_heads=2, backend="cpu"),
        "favor-near": lambda: NativeFavor(D, 16, near=5, sinks=0, estimator="hyperbolic", backend="cpu"),
        "favor-more-sinks-than-near": lambda: NativeFavor(D, 16, near=4, sinks=9, num_heads=3, backend="cpu"),
        "favor-all-near": lambda: NativeFavor(D, 16, near=200, sinks=1, backend="cpu"),
        "favor-reach": lambda: NativeFavor(D, 16, near=3, reach=4, sinks=2, backend="cpu"),
        "favor-reach-alone": lambda: NativeFavor(
            D, 16, near=1, reach=5, sinks=0, kernel="gaussian", num_heads=2, backend="cpu"
        ),
        "favor-reach-past-the-end": lambda: NativeFavor(D, 16, near=8, reach=30, sinks=9, backend="cpu"),
        "favor-reach-chunk": lambda: NativeFavor(D, 16, near=2, reach=3, sinks=0, chunk=5, backend="cpu"),
        "favor-reach-whole-vectors": lambda: NativeFavor(16, 48, near=4, reach=2, sinks=2, backend="cpu"),
        "favor-reach-per-query-head": lambda: PerQueryHead(D, 16, near=4, reach=2, sinks=7, num_heads=4, backend="cpu"),
        "favor-reach-hedgehog": lambda: fitted(
            NativeFavor, D, 16, estimator="hedgehog", near=4, reach=3, sinks=2, num_heads=2, backend="cpu"
        ),
        "favor-window": lambda: NativeFavor(D, 16, near=4, reach=3, sinks=2, far=False, backend="cpu"),
        "favor-window-gaussian": lambda: NativeFavor(
            D, 16, near=8, sinks=2, far=False, kernel="gaussian", backend="cpu"
        ),
        "favor-sinks-alone": lambda: NativeFavor(D, 16, near=0, sinks=3, far=False, backend="cpu"),
        "favor-gaussian": lambda: NativeFavor(D, 16, near=8, sinks=2, kernel="gaussian", backend="cpu"),
        "favor-gaussian-paper": lambda: NativeFavor(
            D, 16, near=0, sinks=0, kernel="gaussian", scale=0.5, backend="cpu"
        ),
        "favor-per-query-head": lambda: PerQueryHead(D, 16, near=8, sinks=2, num_heads=4, backend="cpu"),
        "favor-calibrated": lambda: fitted(
            NativeFavor, D, 16, estimator="calibrated", near=8, sinks=2, num_heads=2, transform=True, backend="cpu"
        ),
        "favor-hedgehog": lambda: fitted(
            NativeFavor, D, 16, estimator="hedgehog", near=8, sinks=2, num_heads=2, backend="cpu"
        ),
        "favor-hedgehog-paper": lambda: fitted(
            NativeFavor, D, 16, estimator="hedgehog", near=0, sinks=0, backend="cpu"
        ),
        "favor-exponential": lambda: fitted(
            NativeFavor, D, 16, estimator="exponential", near=8, sinks=2, num_heads=2, backend="cpu"
        ),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


# Against the torch engine ---------------------------------------------------------------------------------------------


def assert_engines_agree(attention: Mechanism, length: int, *, causal: bool, size: float = 1.0) -> None:
    """Outputs and gradients of the C++ engine in float32 against those of torch in float64."""
    double = make_inputs(attention, length, size=size).leaves()
    single = double.to(torch.float32).leaves()
    got, want = attention(*single, causal=causal), attention(*double, causal=causal)
    assert_close(got, want, 1e-5, "output")
    for name, g, w in zip("qkv", gradients(got, single), gradients(want, double), strict=True):
        assert_close(g, w, 1e-5, f"gradient of {name}")


CUT = {
    "favor": lambda: FavorAttention(20, 100, near=16, sinks=3),
    "favor-long-blocks": lambda: FavorAttention(20, 100, near=150, sinks=0, kernel="gaussian"),
    "favor-reach": lambda: FavorAttention(20, 100, near=16, reach=5, sinks=3),
    "favor-reach-long-blocks": lambda: FavorAttention(20, 100, near=70, reach=2, sinks=0, kernel="gaussian"),
    "favor-window": lambda: FavorAttention(20, 100, near=10, reach=3, sinks=3, far=False),
    "favor-sinks-alone": lambda: FavorAttention(20, 100, near=0, sinks=3, far=False),
    "favor-paper": lambda: FavorAttention(20, 100, near=0, sinks=0, num_heads=1),
    "favor-sinks": lambda: FavorAttention(20, 100, near=0, sinks=5, num_heads=1),
    "linear": lambda: LinearAttention(66),
    "linear-relu": lambda: LinearAttention(66, feature_map="relu"),
    "linear-projected": lambda: LinearAttention(20, feature_map="softplus", num_features=40),
    "linear-exp": lambda: LinearAttention(50, feature_map="exp"),
    "linear-whole-vectors": lambda: LinearAttention(64),
    "favor-whole-vectors": lambda: FavorAttention(32, 64, near=32, sinks=4),
}


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_of_a_head_sum_up(name: str, count: int, causal: bool) -> None:
    """More threads than heads: slices of FAVOR's features, stretches of linear attention's tokens. One: whole heads."""
    with threads(count):
        assert_engines_agree(CUT[name](), 333, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", ["favor", "favor-reach", "favor-window", "favor-paper", "linear"])
def test_parts_of_a_head_meet_more_than_once(name: str, causal: bool) -> None:
    """Longer than the tokens between two meetings, and than those between two borders, by an odd number."""
    with threads(3):
        assert_engines_agree(CUT[name](), 9001, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("near", "reach"), [(4, 9), (8, 6), (12, 4), (16, 4), (16, 5), (32, 3)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_wide_windows(near: int, reach: int, count: int, causal: bool) -> None:
    """Sections of a tile with one near block or several, query heads that share keys, and values that have a centre."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2)
    double = [torch.randn(1, h, 1100, 20, generator=generator, dtype=torch.float64) for h in heads]
    double[2] += 1
    mask = torch.rand(1, 1100, generator=generator) > 0.1
    attention = FavorAttention(20, 48, near=near, reach=reach, sinks=2)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in double]
        out = attention(*leaves, causal=causal, key_mask=mask)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    with threads(count):
        got, want = run(torch.float32), run(torch.float64)
    for name, g, w in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(g, w, 1e-5, name)


@pytest.mark.parametrize("length", [5, 63, 70, 300])
@pytest.mark.parametrize("reach", [1, 3, 16, 1000])
def test_the_last_state_ends_reach_blocks_before_the_last_one(reach: int, length: int) -> None:
    """Without a mask that says which keys to fold; a tile of the engine may go on behind the last token."""
    options = FavorOptions(4, 0, 0.5, gaussian=False, chunk=0, backend="auto", reach=reach)
    double = torch.randn(3, 1, 2, length, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in double)
        feature_map = draw_feature_map(head_dim=8, num_features=16, seed=0)
        _, _, far_sum = favor_attention(q, k, v, feature_map, options, causal=True)
        return far_sum, *torch.autograd.grad(far_sum.square().sum(), (k, v))

    got, want = run(torch.float32), run(torch.float64)
    for name, g, w in zip(("state", "dk", "dv"), got, want, strict=True):
        assert_close(g, w, 1e-5, name)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("near", [10, 12, 24])
def test_what_a_call_leaves_in_memory_does_not_reach_the_next(near: int, causal: bool) -> None:
    """Blocks that are no whole panels, and values less a centre: room that nobody filled, after a call with NaN."""
    attention = FavorAttention(8, 16, near=near, reach=3, sinks=2)
    q, k, v = torch.randn(3, 1, 2, 1200, 8, generator=torch.Generator().manual_seed(0)) + 1

    def run(v: Tensor) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, causal=causal)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    with threads(1):
        before = run(v)
        run(torch.full_like(v, torch.nan))
        assert all(map(torch.equal, before, run(v)))


def test_wide_windows_of_heads_in_portions() -> None:
    """Keys that the rows of two portions see get gradients from both."""
    with threads(2):
        assert_engines_agree(FavorAttention(64, 256, near=16, reach=5, num_heads=4), 4500, causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("near", [0, 32], ids=["paper", "near"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_need_smaller_blocks(near: int, count: int, causal: bool) -> None:
    """Keys so large that blocks are cut down to single tokens, in the backward too."""
    native, torchs = (FavorAttention(8, 64, near=near, sinks=0, backend=b) for b in ("cpu", "torch"))
    single = make_inputs(native, 200, size=9.0).to(torch.float32)

    def run(attention: Mechanism, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = single.to(dtype).leaves()
        out = attention(*leaves, causal=causal)
        return out, *gradients(out, leaves)

    with threads(count):
        got, peer, want = run(native, torch.float32), run(torchs, torch.float32), run(torchs, torch.float64)
    for name, g, p, w in zip(("output", "dq", "dk", "dv"), got, peer, want, strict=True):
        assert_close(g, w, max(1e-5, 2 * relative_error(p, w)), name)  # twice what torch loses in float32


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("count", [1, 3])
def test_stretches_of_tokens_with_all_there_is(count: int, causal: bool) -> None:
    """Masked keys, and gradients of a projection that all stretches add to."""
    generator = torch.Generator().manual_seed(0)
    double = [torch.randn(1, 2, 1500, 12, generator=generator, dtype=torch.float64) for _ in range(3)]
    double.append(torch.randn(1, 24, 12, generator=generator, dtype=torch.float64))
    mask = torch.rand(1, 1500, generator=generator) > 0.3
    mask[:, 700:900] = False

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in double]
        out = linear_attention(*leaves[:3], causal=causal, key_mask=mask, feature_map="softplus", projection=leaves[3])
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    with threads(count):
        got, want = run(torch.float32), run(torch.float64)
    for name, g, w in zip(("output", "dq", "dk", "dv", "dW"), got, want, strict=True):
        assert_close(g, w, 1e-5, name)


@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_stretches_of_tokens_begin_where_a_state_ends(length: int) -> None:
    """The state goes in and comes out, and gradients flow through both."""
    attention = LinearAttention(12)
    double = make_inputs(attention, 70 + length, batch=1)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = double.to(dtype).leaves()
        first, state = attention.extend(*leaves.tokens(0, 70))
        second, state = attention.extend(*leaves.tokens(70, 70 + length), state)
        loss = first.square().sum() + second.square().sum() + state.far_sum.square().sum()
        return first, second, state.far_sum, *torch.autograd.grad(loss, leaves)

    with threads(3):
        got, want = run(torch.float32), run(torch.float64)
    for name, g, w in zip(("first", "second", "state", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(g, w, 1e-5, name)


@pytest.mark.parametrize("name", ["favor", "linear", "linear-projected"])
def test_results_do_not_depend_on_what_other_threads_do(name: str) -> None:
    """The same bits, again and again, for one number of threads."""
    attention = CUT[name]()
    with threads(3):
        inputs = make_inputs(attention, 500).to(torch.float32).leaves()
        outs = [attention(*inputs, causal=True) for _ in range(5)]
        grads = [gradients(out, inputs) for out in outs]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(g, w) for got in grads for g, w in zip(got, grads[0], strict=True))


@pytest.mark.parametrize("feature_map", ["elu1", "softplus", "relu2"])
def test_small_slopes_keep_their_digits(feature_map: str) -> None:
    """Gradients are found from features alone: token by token, tiny ones too, at most twice what torch loses."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-5, 0, 30) if feature_map == "relu2" else torch.linspace(-14, 3, 30)
    q, k = sizes.double()[:, None] * (1 + 0.1 * torch.randn(2, 30, 4, generator=generator, dtype=torch.float64))
    k = k.flip(0)
    double = [t[None, None] for t in (q, k, torch.randn(30, 4, generator=generator, dtype=torch.float64))]

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        attention = LinearAttention(4, feature_map=feature_map, backend=backend)
        leaves = [t.to(dtype).requires_grad_() for t in double]
        return torch.autograd.grad(attention(*leaves).square().sum(), leaves)

    def errors(got: Tensor, want: Tensor) -> Tensor:
        return (got - want).norm(dim=-1) / want.norm(dim=-1)

    native, peer = run("cpu", torch.float32), run("torch", torch.float32)
    for name, got, theirs, want in zip("qkv", native, peer, run("torch", torch.float64), strict=True):
        assert bool((errors(got, want) <= 1e-5 + 2 * errors(theirs, want)).all()), name


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("feature_map", "shift", "size"), [("elu1", -50, 1), ("softplus", -50, 1), ("relu2", 0, 1e-9)])
def test_gradients_of_tiny_features(feature_map: str, shift: float, size: float, causal: bool) -> None:
    """Of queries and keys at once: their products are beyond float32, the gradients are not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 40, 4, generator=generator, dtype=torch.float64)
    double = [size * q + shift, size * k + shift, v]

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        attention = LinearAttention(4, feature_map=feature_map, backend=backend)
        leaves = [t.to(dtype).requires_grad_() for t in double]
        return torch.autograd.grad(attention(*leaves, causal=causal).square().sum(), leaves)

    native, peer = run("cpu", torch.float32), run("torch", torch.float32)
    for name, got, theirs, want in zip("qkv", native, peer, run("torch", torch.float64), strict=True):
        assert relative_error(got, want) <= 1e-5 + 2 * relative_error(theirs, want), name


def test_nan_in_a_token_that_counts_is_seen() -> None:
    for attention in (
        FavorAttention(D, 16, near=4, sinks=1),
        FavorAttention(D, 16, near=0, sinks=0),
        LinearAttention(D),
    ):
        for position in range(3):
            inputs = [t.float() for t in make_inputs(attention, 30)]
            inputs[position][0, 0, 17] = torch.nan
            out = attention(*inputs, causal=True)
            assert not bool(out[0, 0, 17].isfinite().all())
            assert bool(out[1].isfinite().all()), "it reached another sequence"


# Choosing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "dtype", "reason"),
    [
        (
            FavorAttention(D, backend="cpu"),
            torch.float64,
            "it takes float32, bfloat16, float16, and the tensors are float64",
        ),
        (
            LinearAttention(D, backend="cpu"),
            torch.float64,
            "it takes float32, bfloat16, float16, and the tensors are float64",
        ),
        (
            FavorAttention(D, near=0, sinks=0, estimator="trigonometric", backend="cpu"),
            torch.float32,
            "it has no signed (trigonometric) features",
        ),
    ],
    ids=["favor", "linear", "trigonometric"],
)
def test_what_it_cannot_do_is_said(attention: Mechanism, dtype: torch.dtype, reason: str) -> None:
    inputs = make_inputs(attention, 9).to(dtype)
    message = f"backend='cpu' cannot be used: {reason}; backend='auto' falls back to torch"
    with pytest.raises(ConfigError, match=re.escape(message)):
        attention(*inputs)


def test_without_a_library_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "AVAILABLE", False)
    without = replace(engines.ENGINES["cpu"], missing="there is none")
    monkeypatch.setitem(engines.ENGINES, "cpu", without)
    inputs = make_inputs(FavorAttention(D), 9).to(torch.float32)
    assert bool(FavorAttention(D)(*inputs).isfinite().all())
    with pytest.raises(ConfigError, match="there is none"):
        FavorAttention(D, backend="cpu")(*inputs)


PRINT_ENGINE = "from subquad.kernels.cpu import library; print(library.AVAILABLE, library.WHY_MISSING)"


@pytest.mark.parametrize(
    ("machine", "shown"),
    [
        ("generic", "True"),
        ("off", "False switched off by SUBQUAD_CPU"),
        ("z80", "False SUBQUAD_CPU=z80 names no engine"),
    ],
)
def test_the_engine_can_be_named(machine: str, shown: str) -> None:
    environment = os.environ | {"SUBQUAD_CPU": machine}
    done = subprocess.run([sys.executable, "-c", PRINT_ENGINE], env=environment, capture_output=True, check=True)
    assert done.stdout.decode().startswith(shown)


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "fingerprint", lambda _: "something else")
    assert "made from other sources: install subquad again" in str(library._load())


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert build.build(tmp_path) == build.Built([], ["no C++ compiler found"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert all("no-such-compiler" in failure for failure in build.build(tmp_path).failures)
    monkeypatch.setenv("CXX", "false")  # a compiler that fails
    assert build.build(tmp_path).libraries == []


# Machines and sanitizers ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_generic_engine_computes_the_same() -> None:
    """The one for machines we do not know: half the lanes, no fused multiply-add."""
    environment = os.environ | {"SUBQUAD_CPU": "generic"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("machine", ["generic", "this one"])
def test_nothing_reads_memory_that_nobody_wrote(machine: str, tmp_path: Path) -> None:
    """These tests once more, by an engine whose fresh memory is NaN."""
    shutil.copytree(library.FOLDER / build.SOURCES, tmp_path / build.SOURCES)
    command = build.compiler()
    assert command is not None
    wanted = library.wanted_machine() if machine == "this one" else machine
    engine = build.compile_engine(tmp_path, wanted, command, ("-DSUBQUAD_POISON",))
    assert isinstance(engine, Path), engine
    folder = Path(__file__).parent
    tests = [str(folder / f"test_{name}.py") for name in ("cpu", "favor", "linear", "sparse")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not full", *tests],
        env=os.environ | {"SUBQUAD_CPU": str(engine)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' library")
def test_no_bad_memory_access_and_no_undefined_behaviour(tmp_path: Path) -> None:
    """The kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""
    root, environment = Path(__file__).parents[2], sanitized_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "sanitized.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all cases done" in done.stdout
