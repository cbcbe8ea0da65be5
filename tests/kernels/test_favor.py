"""The engines below the mechanisms: feature maps as data, cost, memory, and torch's compiler."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subquad import FavorAttention, FeatureMap, LinearAttention, Mechanism
from subquad.functional import favor_attention
from subquad.kernels import problem
from subquad.kernels.centre import LOW_FROM
from subquad.kernels.favor import native
from subquad.kernels.favor import torch as favor
from subquad.kernels.favor.inputs import FavorInputs, FavorOptions
from subquad.kernels.linear import torch as linear
from subquad.kernels.linear.inputs import LinearInputs, LinearOptions
from subquad.testing import assert_close, make_inputs

D, M = 6, 8
PRECISION = {"torch": torch.float64, "cpu": torch.float32}
ENGINES = pytest.mark.parametrize("engine", PRECISION)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learned_map(heads: int, rule: str) -> FeatureMap:
    """A map with nothing special about it: other weights for queries and keys, bias, and an affine offset."""
    tensors = [draw(heads, M, D, seed=1), draw(heads, M, D, seed=2), draw(heads, M, seed=3)]
    offset = [draw(heads, D, seed=4), draw(heads, seed=5)]
    query, key, bias, weight, shift = (t.requires_grad_() for t in (*tensors, *offset))
    return FeatureMap(query, key, bias, rule, 2 if rule == "groups" else 1, weight, shift)


def dense(q: Tensor, k: Tensor, v: Tensor, map: FeatureMap, near: int, sinks: int, causal: bool) -> Tensor:
    """The definition of `FeatureMap`, pair by pair."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    tensors = (map.query, map.key, map.key_bias, map.offset_weight, map.offset_bias)
    wq, wk, bias, weight, shift = (
        t if t.shape[0] in (1, q.shape[1]) else t.repeat_interleave(repeat, 0) for t in tensors if t is not None
    )
    x, y = (t * D**-0.25 for t in (q, k))

    def scalar(x: Tensor, logs: Tensor) -> Tensor:
        if map.rule == "norm":
            return logs - x.square().sum(-1, keepdim=True) / 2
        if map.rule == "groups":
            return logs.unflatten(-1, (2, -1)).log_softmax(-1).flatten(-2)
        return logs

    log_phi = scalar(x, x @ wq.mT) + ((x * weight[:, None]).sum(-1) + shift[:, None])[..., None]
    log_psi = scalar(y, y @ wk.mT) + bias[:, None]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    exact = (j < sinks) | (((i // near - j // near).abs() <= 1) if near else torch.tensor(False))
    logits = torch.where(exact, x @ y.mT, (log_phi[:, :, :, None] + log_psi[:, :, None]).logsumexp(-1))
    return (logits.masked_fill(j > i, -torch.inf) if causal else logits).softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near", [0, 4])
@pytest.mark.parametrize("rule", ["none", "norm", "groups"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@ENGINES
def test_any_feature_map_and_its_gradients(engine: str, heads: int, rule: str, near: int, causal: bool) -> None:
    """Shared, per key head, per query head."""
    inputs = [t.requires_grad_() for t in (draw(2, 4, 21, D), draw(2, 2, 21, D, seed=6), draw(2, 2, 21, 5, seed=7))]
    feature_map = learned_map(heads, rule)
    leaves = [*inputs, *(t for t in feature_map if isinstance(t, Tensor))]
    q, k, v = inputs
    dtype = PRECISION[engine]
    cast_map = feature_map._replace(
        **{n: t.to(dtype) for n, t in feature_map._asdict().items() if isinstance(t, Tensor)}
    )
    x, y, z = (t.to(dtype) for t in inputs)
    got = favor_attention(x, y, z, cast_map, near=near, sinks=2, causal=causal, backend=engine)
    want = dense(q, k, v, feature_map, near, 2, causal)
    assert_close(got, want, 1e-11 if engine == "torch" else 1e-5, "output")
    direction = draw(*want.shape, seed=8)
    every = (torch.autograd.grad(out, leaves, direction.to(out.dtype)) for out in (got, want))
    size = max(t.norm().item() for t in torch.autograd.grad(want, leaves, direction, retain_graph=True))
    for number, (g, w) in enumerate(zip(*every, strict=True)):
        # an offset of the queries can cancel: its gradient is 0, up to rounding of what it is made of
        floor = size if w.norm() < 1e-9 * size else 0.0
        assert_close(g, w, 1e-10 if engine == "torch" else 1e-5, f"gradient of leaf {number}", floor)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "attention",
    [FavorAttention(D, 2, near=4, sinks=2), FavorAttention(D, 2, near=0, sinks=0), LinearAttention(D, num_features=2)],
    ids=["favor", "favor-paper", "linear"],
)
def test_many_tiles_and_borders(attention: Mechanism, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one block and a border every other tile, as large batches have them."""
    monkeypatch.setattr(problem, "TILE_ELEMENTS", 1)
    attention = copy.deepcopy(attention)
    setattr(attention, "chunk", 4)  # noqa: B010 - the mechanisms here have it
    inputs = make_inputs(attention, 61).leaves()
    assert problem.border_count(61, 4, 2) == 8
    got, want = attention(*inputs, causal=causal), attention.reference(*inputs, causal=causal)
    assert_close(got, want, 1e-12, "output")
    every = zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)), strict=True)
    for g, w in every:
        assert_close(g, w, 1e-11, "gradient")


def test_borders_are_fewer_than_values() -> None:
    """A large batch has small tiles, but states are still kept only every 4 M tokens."""
    for heads in (1, 8, 64, 1024):
        for near in (16, 0):
            options = favor_options(near, causal=True)
            borders = favor.border_count(8192, heads, 256, options)
            assert borders * 256 * 65 <= 8192 * 64


def favor_options(near: int, causal: bool, borders: bool = True) -> FavorOptions:
    return FavorOptions(near, 0, 0.25, False, 0, "torch", causal, borders=borders)


def favor_inputs(attention: FavorAttention, q: Tensor, k: Tensor, v: Tensor) -> FavorInputs:
    m = attention.feature_map
    return FavorInputs(q, k, v, m.query, m.key, m.key_bias, sink_k=k[:, :, :0], sink_v=v[:, :, :0])


def saved_of(outputs: problem.Outputs) -> problem.Saved:
    grad = torch.ones_like(outputs.out)
    return problem.Saved(grad, outputs.out, outputs.normaliser, None, outputs.borders_max, outputs.borders_sum, None)


def favor_flops(length: int, near: int, causal: bool, backward: bool) -> int:
    attention = FavorAttention(16, 32, near=near, sinks=0)
    q, k, v = torch.randn(3, 1, 1, length, 16)
    inputs, options = favor_inputs(attention, q, k, v), favor_options(near, causal)
    with FlopCounterMode(display=False) as counter:
        out = favor.forward(inputs, options)
        if backward:
            favor.backward(inputs, options, saved_of(out), want_map=False)
    return counter.get_total_flops()


def linear_flops(length: int, chunk: int, causal: bool, backward: bool) -> int:
    q, k, v = torch.randn(3, 1, 1, length, 16)
    inputs, options = LinearInputs(q, k, v), LinearOptions("elu1", 1.0, chunk, "torch", causal, borders=True)
    with FlopCounterMode(display=False) as counter:
        out = linear.forward(inputs, options)
        if backward:
            linear.backward(inputs, options, saved_of(out), want_map=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("flops", [favor_flops, linear_flops])
@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_cost_doubles_with_the_length(flops, block: int, causal: bool) -> None:
    for backward in (False, True):
        short, long = (flops(length, block, causal, backward) for length in (8192, 16384))
        assert short > 0
        assert long / short == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "attention",
    [FavorAttention(16, 256), FavorAttention(16, 256, near=0, sinks=0), LinearAttention(16, num_features=256)],
    ids=["favor", "favor-paper", "linear"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_features_are_kept_for_the_backward(attention: Mechanism, causal: bool) -> None:
    """What autograd holds on to is a few times the inputs, far below length x features."""
    length, kept = 4096, {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    q, k, v = torch.randn(3, 1, 1, length, 16).requires_grad_().unbind(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(q, k, v, causal=causal)
    states = 2 * 256 * 18 * 8  # borders
    assert sum(kept.values()) < 6 * length * 16 + states < length * 256


MEMORY = """
import pathlib, sys, torch, subquad
torch.set_num_threads(1)
length = int(sys.argv[1])

def memory(what):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) * 1024

attention = subquad.FavorAttention(64, 256, near=int(sys.argv[2]), sinks=0, backend=sys.argv[3])
q, k, v = (torch.randn(1, 4, length, 64).requires_grad_() for _ in range(3))
attention(*(t[:, :, :1024] for t in (q, k, v)), causal=True).sum().backward()
q.grad = k.grad = v.grad = None
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS")
attention(q, k, v, causal=True).sum().backward()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("near", [0, 64])
@ENGINES
def test_peak_memory_is_linear(engine: str, near: int) -> None:
    """Forward and backward, measured in a process of its own: the output (and a byte for each number of a long one),
    three gradients, and little that grows."""
    for length, allowed in ((16384, 60e6 if engine == "cpu" else 100e6), (65536, 100e6)):
        command = [sys.executable, "-c", MEMORY, str(length), str(near), engine]
        peak = int(subprocess.run(command, capture_output=True, check=True).stdout)
        one = 4 * length * 64 * 4  # heads, tokens, dim, bytes
        scratch, features = peak - 4 * one - (one // 4 if length >= LOW_FROM else 0), 4 * one
        assert scratch < allowed, (
            f"{length} tokens: {scratch / 1e6:.0f} MB; their features alone are {features / 1e6:.0f}"
        )


# Operators and the compiler -------------------------------------------------------------------------------------------


def favor_arguments(engine: str, near: int, causal: bool) -> dict[str, Any]:
    """Of the operator, by name."""
    dtype = PRECISION[engine]
    q, k, v = (t.to(dtype).requires_grad_() for t in (draw(2, 4, 23, D), draw(2, 2, 23, D), draw(2, 2, 23, 5)))
    sink_k, sink_v = (t[:, :, :2].detach().clone().requires_grad_() for t in (k, v))
    fields = learned_map(1, "norm")._asdict()
    learned = {name: t.detach().to(dtype).requires_grad_() for name, t in fields.items() if isinstance(t, Tensor)}
    seen = (torch.arange(23) + 1).clamp(max=2)[None] if causal else torch.full((1, 23), 2)
    tensors = {"q": q, "k": k, "v": v, "sink_k": sink_k, "sink_v": sink_v, "sink_seen": seen, **learned}
    masks = {"alive": (torch.arange(23) >= 2)[None], "fold": None, "far_max": None, "far_sum": None}
    numbers = {"near": near, "sinks": 2, "scale": 0.3, "chunk": 0, "groups": 1, "reach": 1}
    choices = {"gaussian": False, "causal": causal, "rule": "norm", "borders": True, "far": True}
    return tensors | masks | numbers | choices | {"backend": engine}


@pytest.mark.full
@pytest.mark.parametrize("near", [0, 4])
@pytest.mark.parametrize("causal", [False, True])
@ENGINES
def test_opcheck_favor(engine: str, near: int, causal: bool) -> None:
    torch.library.opcheck(torch.ops.subquad.favor_forward.default, (), favor_arguments(engine, near, causal))


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True])
@ENGINES
def test_opcheck_linear(engine: str, causal: bool) -> None:
    tensors = {"q": draw(2, 4, 23, D), "k": draw(2, 2, 23, D), "v": draw(2, 2, 23, 5), "weight": draw(1, M, D)}
    arguments: dict[str, Any] = {name: t.to(PRECISION[engine]).requires_grad_() for name, t in tensors.items()}
    arguments |= dict.fromkeys(("log_weight", "alive", "far_max", "far_sum"))
    arguments |= {"feature_map": "elu1", "root": 0.6, "chunk": 4, "causal": causal, "borders": True, "backend": engine}
    torch.library.opcheck(torch.ops.subquad.linear_forward.default, (), arguments)


MECHANISMS = pytest.mark.parametrize(
    "attention",
    [FavorAttention(D, M, near=4, sinks=2), FavorAttention(D, M, near=0, sinks=0), LinearAttention(D)],
    ids=["favor", "favor-paper", "linear"],
)


@pytest.mark.full
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@MECHANISMS
@ENGINES
def test_compile_fullgraph(engine: str, attention: Mechanism) -> None:
    compiled = torch.compile(lambda *x: attention(*x, causal=True), fullgraph=True)
    for length in (9, 17, 33):  # the second length makes it dynamic
        inputs = make_inputs(attention, length).to(PRECISION[engine]).leaves()
        got, want = compiled(*inputs), attention(*inputs, causal=True)
        assert_close(got, want, 1e-12, f"length {length}")
        pairs = zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)), strict=True)
        for g, w in pairs:
            assert_close(g, w, 1e-12, f"gradient, length {length}")


@pytest.mark.full
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@MECHANISMS
@ENGINES
def test_compile_one_decoding_step(engine: str, attention: Mechanism) -> None:
    """A compiled step is made of torch's operations, whichever engine an eager one uses."""
    tolerance = 1e-12 if engine == "torch" else 1e-5
    compiled = torch.compile(attention.extend, fullgraph=True)
    inputs = make_inputs(attention, 13).to(PRECISION[engine])
    _, state = attention.extend(*inputs.tokens(0, 3))
    for t in range(3, 13):
        want, after = attention.extend(*inputs.tokens(t, t + 1), state)
        got, state = compiled(*inputs.tokens(t, t + 1), state)
        assert_close(got, want, tolerance, f"token {t}")
        for g, w in zip(whole_sums(state), whole_sums(after), strict=True):
            assert_close(g, w, tolerance, f"state after token {t}")


def whole_sums(state: Any) -> list[Tensor]:
    """What a state holds, whichever of its digits stand in far_sum and which in far_low."""
    tensors = state._asdict()
    tensors["far_sum"] = tensors["far_sum"].double() + tensors.pop("far_low").double()
    return list(tensors.values())


@pytest.mark.full
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@MECHANISMS
@ENGINES
def test_export_with_dynamic_length(engine: str, attention: Mechanism) -> None:
    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention(q, k, v, causal=True)

    length = torch.export.Dim("length", min=4, max=4096)
    shapes = {name: {2: length} for name in "qkv"}
    example = tuple(make_inputs(attention, 24).to(PRECISION[engine]))
    program = torch.export.export(Causal(), example, dynamic_shapes=shapes)
    for tokens in (5, 24, 130):
        inputs = make_inputs(attention, tokens).to(PRECISION[engine])
        assert_close(program.module()(*inputs), attention(*inputs, causal=True), 1e-12, f"length {tokens}")


@MECHANISMS
def test_autocast(attention: Mechanism) -> None:
    """Under autocast linear layers give bfloat16; attention takes it and keeps its sums in float32."""
    project = torch.nn.Linear(D, D)
    x = torch.randn(2, 4, 20, D, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = project(x)
        out = attention(q, q, q, causal=True)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    want = attention(*[project(x)] * 3, causal=True)
    assert_close(out, want, 0.02, "autocast")
    assert project.weight.grad is not None
    assert bool(project.weight.grad.isfinite().all())


@MECHANISMS
def test_autocast_rounds_nothing_inside(attention: Mechanism) -> None:
    """float32 in, float32 out, with the bits it has without autocast: forward, backward, and token by token."""
    inputs = make_inputs(attention, 20).to(torch.float32).leaves()
    want = attention(*inputs, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(*inputs, causal=True)
        steps, state = [], None
        for t in range(20):
            out, state = attention.extend(*inputs.tokens(t, t + 1), state=state)
            steps.append(out)
        gradients = torch.autograd.grad(got.square().sum(), inputs)
    assert torch.equal(got, want)
    assert_close(torch.cat(steps, 2), want, 1e-5, "steps")
    for g, w in zip(gradients, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        assert_close(g, w, 1e-6, "gradient")


@MECHANISMS
def test_gradients_without_output(attention: Mechanism) -> None:
    """A loss on the state alone (the output unused) has gradients too, and the output alone ignores the state."""
    inputs = make_inputs(attention, 12).leaves()
    state: Any = attention.extend(*inputs)[1]
    q, k, v = torch.autograd.grad(state.far_sum.sum(), inputs, allow_unused=True, materialize_grads=True)
    assert not bool(q.any())
    assert bool(k.any())
    assert bool(v.any())


def test_inference_keeps_no_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = FavorAttention(D, M)
    q, k, v = make_inputs(attention, 300)
    inputs, options = favor_inputs(attention, q, k, v), favor_options(64, causal=True, borders=False)
    assert favor.forward(inputs, options).borders_sum.shape[0] == 0
    kept = []
    forward = native.forward
    monkeypatch.setattr(native, "forward", lambda i, o: kept.append(o.borders) or forward(i, o))
    for needs_gradients in (False, True):
        attention(q.float().requires_grad_(needs_gradients), k.float(), v.float(), causal=True)
    assert kept == [False, True]
