"""Queries, keys, values and outputs taken out of models, ours and those of Hugging Face, and what is left behind."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subquad
from fitted import brief
from subquad import FavorAttention, SoftmaxAttention, errors
from subquad.diagnostics import spectrum
from subquad.mechanism import Mechanism
from subquad.mechanisms.window import WindowAttention
from subquad.models import SubquadForCausalLM, SubquadModel
from subquad.nn import LongformerSelfAttention
from subquad.recording import calls as calls_module
from subquad.recording.calls import Call, Layer
from subquad.recording.fidelity import ExactOutputs
from subquad.recording.layers import own_layers
from subquad.recording.record import Recording
from subquad.recording.stream import is_favor, stream
from subquad.testing import assert_close
from tiny_hugging_face import bert, gpt2, llama
from tiny_models import make, random_ids

MIXED = {"attention": ["favor", "softmax", "favor"], "num_hidden_layers": 3}
OPTIONS = [{"near": 4, "sinks": 1, "num_features": 8, "scale": 0.7}, {}, {"near": 4, "sinks": 1, "num_features": 8}]


def mixed(kind: Any = SubquadForCausalLM, **options: Any) -> Any:
    """FAVOR, exact attention, FAVOR; two query heads for each key head."""
    return make(kind, **{**MIXED, "attention_options": OPTIONS, **options})


def padded(rows: int = 2, length: int = 30) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - 7 :] = 0
    mask[-1, :5] = 0
    return {"input_ids": random_ids(rows, length), "attention_mask": mask}


def recorded(model: nn.Module, *batches: Any, exact: bool = True, **options: Any) -> list[Any]:
    return list(Recording(model, batches, op="test", exact=exact, **options))


def same_calls(one: Call, other: Call) -> bool:
    tensors = [(getattr(one, name), getattr(other, name)) for name in ("q", "k", "v", "key_mask", "output")]
    equal = all(a is b is None or torch.equal(a, b) for a, b in tensors)
    return equal and (one.causal, one.scale, one.gaussian) == (other.causal, other.scale, other.gaussian)


class Pair(nn.Module):
    """Two layers on the same inputs, the later one first."""

    def __init__(self, early: Mechanism, late: Mechanism) -> None:
        super().__init__()
        self.early, self.late = early, late

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.early(q, k, self.late(q, k, v))


def qkv(length: int = 12, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 2, length, dim, generator=torch.Generator().manual_seed(0))
    return q, k, v


# What a call is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_calls_are_what_our_layers_are_given(exact: bool) -> None:
    model, batch = mixed(), padded()
    seen: list[tuple[Any, ...]] = []
    for mechanism in model.mechanisms():
        mechanism.register_forward_hook(lambda _, args, how, out: seen.append((*args, how, out)), with_kwargs=True)
    layers = recorded(model, batch, exact=exact)
    assert [layer.name for layer in layers] == [f"model.layers.{i}.attention.mechanism" for i in range(3)]
    assert [layer.mechanism for layer in layers] == model.mechanisms()
    for layer, (q, k, v, how, out) in zip(layers, seen, strict=True):
        (call,) = layer.calls
        assert all(torch.equal(a, b) for a, b in zip((call.q, call.k, call.v), (q, k, v), strict=True))
        assert (call.q.shape[1], call.k.shape[1]) == (4, 2)
        assert call.causal is how["causal"] is True
        assert torch.equal(call.key_mask, batch["attention_mask"].bool())
        assert (call.output is out) == exact
    assert [layer.calls[0].scale for layer in layers] == [0.7, 0.5, 0.5]


FAMILIES = {"bert": bert, "gpt2": gpt2, "llama": llama}


@pytest.mark.parametrize("make_model", FAMILIES.values(), ids=FAMILIES)
def test_calls_are_what_layers_of_hugging_face_are_given(make_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its own function gets, which makes weights of all pairs."""
    model, ids = make_model(), random_ids(2, 20)
    module = sys.modules[type(model).__module__]
    theirs, seen = module.eager_attention_forward, []

    def noted(layer: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        out, weights = theirs(layer, q, k, v, *rest, **options)
        seen.append((q, k, v, out.transpose(1, 2), options["scaling"]))
        return out, weights

    monkeypatch.setattr(module, "eager_attention_forward", noted)
    model.set_attn_implementation("eager")
    model(ids)
    layers = recorded(model, ids)
    assert all(layer.mechanism is None for layer in layers)
    for layer, (q, k, v, out, scale) in zip(layers, seen, strict=True):
        (call,) = layer.calls
        for got, want in zip((call.q, call.k, call.v, call.output), (q, k, v, out), strict=True):
            assert_close(got, want, 1e-6, layer.name)  # llama's softmax is one of float32
        assert (call.scale, call.causal, call.key_mask) == (scale, make_model is not bert, None)


@pytest.mark.parametrize("make_model", FAMILIES.values(), ids=FAMILIES)
def test_masks_of_hugging_face_models(make_model: Callable) -> None:
    batch = padded()
    for layer in recorded(make_model(), batch):
        assert torch.equal(layer.calls[0].key_mask, batch["attention_mask"].bool())


def test_attention_of_hugging_face_without_a_scale_has_the_usual_one() -> None:
    model, ids = bert(), torch.randint(0, 30, (1, 20))
    told = recorded(model, ids)[0].calls[0]
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = None
    silent = recorded(model, ids)[0].calls[0]
    assert told.scale == silent.scale == 0.5  # of 4 dimensions


@pytest.mark.parametrize("name", ["softmax", "favor", "linformer", "window", "strided", "lsh", "cluster", "identity"])
def test_scales_of_every_mechanism(name: str) -> None:
    given = {"linformer": {"max_length": 12, "rank": 4}, "lsh": {"bucket_size": 4}}.get(name, {})
    scales = {"scale": 0.3} if name != "identity" else {}
    for options, want in ((scales, scales.get("scale", 8**-0.5)), ({}, 8**-0.5)):
        found: list[Call] = []
        attention = subquad.attention(name, head_dim=8, **given, **options)
        stream(attention, [qkv()], lambda _, call, to=found: to.append(call), op="t", exact=False, kinds=Mechanism)
        assert found[0].scale == want


def test_the_gaussian_kernel_is_recorded() -> None:
    attention = FavorAttention(8, 4, near=0, sinks=0, kernel="gaussian", scale=0.3)
    (layer,) = recorded(attention, qkv())
    (call,) = layer.calls
    q, k, v = qkv()
    logits = -0.3 * (q[:, :, :, None] - k[:, :, None]).square().sum(-1) / 2
    assert (layer.name, call.gaussian) == ("favor", True)
    assert_close(call.output, logits.softmax(-1) @ v, 1e-5)


def test_other_inputs_have_no_output() -> None:
    q, k, v = qkv()
    call = Call(q, k, v, False, None, 0.5)
    call = call.answered(call.exact(), exact=True)
    assert call.exact() is call.output
    assert_close(call.sequences(torch.tensor([1])).exact(), call.exact()[1:], 1e-12)
    assert call.replace(q=2 * q).output is None
    assert_close(call.replace(q=2 * q).exact(), SoftmaxAttention(8, scale=1.0)(q, k, v), 1e-6)
    assert call.precise() is call
    half = call.replace(q=q.half(), k=k.half(), v=v.half())
    half = half.answered(half.exact(), exact=True)
    assert half.precise().output is None
    assert half.precise().q.dtype == ExactOutputs([half]).outputs[0].dtype == torch.float32


def test_only_exact_outputs_are_taken_for_exact() -> None:
    attention = FavorAttention(8, 4, near=0, sinks=0)
    found: list[Call] = []
    stream(attention, [qkv()], lambda _, call: found.append(call), op="test", exact=False)
    assert torch.equal(found[0].output, attention(*qkv()))  # pyright: ignore[reportArgumentType]
    assert_close(found[0].exact(), SoftmaxAttention(8)(*qkv()), 1e-6)


# How a model runs while it is recorded --------------------------------------------------------------------------------


class Raises(FavorAttention):
    def forward(self, *args: Any, **options: Any) -> Tensor:
        raise AssertionError("what is thrown away must not be computed")


def test_exact_layers_never_compute_their_own_output() -> None:
    attention = Raises(8, 4, near=0, sinks=0)
    (layer,) = recorded(attention, qkv())
    assert_close(layer.calls[0].output, SoftmaxAttention(8)(*qkv()), 1e-6)
    assert own_layers(attention, FavorAttention) == [Layer("favor", attention)]
    with pytest.raises(AssertionError):
        recorded(attention, qkv(), exact=False)


def test_models_run_exactly_while_they_are_recorded() -> None:
    """Every layer is asked what it would be asked if all were exact, and is left as it was."""
    favor, ids = mixed(), random_ids(2, 50)
    before = favor(ids).logits
    layers = recorded(favor, ids)
    assert torch.equal(favor(ids).logits, before)
    exact = mixed()
    for mechanism in exact.mechanisms():
        if isinstance(mechanism, FavorAttention):
            mechanism.options = mechanism.options._replace(near=64)
    for got, want in zip(layers, recorded(exact, ids, exact=False), strict=True):
        assert_close(got.calls[0].q, want.calls[0].q, 1e-9, got.name)


def test_layers_that_are_not_wanted_answer_exactly_too() -> None:
    model, ids = mixed(), random_ids(2, 50)
    (last,) = recorded(model, ids, wanted=lambda layer: ".2." in layer.name)
    assert same_calls(last.calls[0], recorded(model, ids)[2].calls[0])
    assert [layer.name for layer in recorded(model, ids, wanted=is_favor)] == [
        f"model.layers.{i}.attention.mechanism" for i in (0, 2)
    ]
    names = [layer.name for layer in recorded(bert(), ids, wanted=lambda layer: ".1." in layer.name)]
    assert names == ["encoder.layer.1.attention.self"]


def test_calls_are_streamed_of_wanted_layers_alone() -> None:
    model = Pair(FavorAttention(8, 4, near=0, sinks=0), SoftmaxAttention(8))
    told: list[str] = []
    layers = stream(model, [qkv()], lambda layer, _: told.append(layer.name), op="test", exact=False, wanted=is_favor)
    assert (told, [layer.name for layer in layers]) == (["early"], ["early", "late"])


@pytest.mark.parametrize("make_model", [mixed, bert])
def test_recording_leaves_modes_alone(make_model: Callable) -> None:
    model = make_model().train()
    list(model.modules())[5].eval()
    before = [module.training for module in model.modules()]
    recorded(model, random_ids(1, 20))
    spectrum(model, random_ids(1, 20))
    assert [module.training for module in model.modules()] == before


class Breaks(nn.Module):
    """A model whose last layer fails in the second batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.runs = model, 0

    @property
    def config(self) -> Any:
        return self.model.config

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)  # pyright: ignore[reportCallIssue]

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids)
        self.runs += 1
        if self.runs == 2:
            raise ValueError("broken")
        return out


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make_model", [mixed, bert])
def test_everything_is_restored_after_an_error(make_model: Callable, exact: bool) -> None:
    model, ids = Breaks(make_model().train()), random_ids(1, 20)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="broken"):
        recorded(model, ids, ids, exact=exact)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == before
    assert len(recorded(model, ids)) == 3


def test_a_forward_of_another_library_stays() -> None:
    """As accelerate puts one into modules that it moves between devices."""
    attention, used = FavorAttention(8, 4, near=0, sinks=0), []
    theirs = attention.forward

    def wrapped(*args: Any, **options: Any) -> Tensor:
        used.append(1)
        return theirs(*args, **options)

    vars(attention)["forward"] = wrapped
    recorded(attention, qkv(), exact=False)
    assert (vars(attention)["forward"], used) == (wrapped, [1])


@pytest.mark.parametrize("make_model", [mixed, bert])
def test_a_model_that_was_recorded_can_go(make_model: Callable) -> None:
    model = make_model()
    layers = recorded(model, random_ids(1, 20))
    watched = [weakref.ref(model), weakref.ref(layers[0].calls[0])]
    del model, layers
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


# Memory ---------------------------------------------------------------------------------------------------------------


def counted(model: nn.Module) -> list[int]:
    """One entry for each time that the model runs."""
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("make_model", [mixed, bert])
def test_a_small_budget_gives_the_same_calls(make_model: Callable, exact: bool) -> None:
    model, batches = make_model(), [padded(), {"input_ids": random_ids(3, 20)}]
    want = recorded(model, *batches, exact=exact)
    sizes = [sum(call.nbytes for call in layer.calls) for layer in want]
    runs = counted(model)
    for memory, expected in ((sum(sizes), 1), (sum(sizes) - 1, 2), (sizes[0] + sizes[1], 2), (sizes[0], 3), (1, 3)):
        runs.clear()
        got = recorded(model, *batches, exact=exact, memory=memory)
        assert len(runs) == expected * len(batches), memory
        for one, other in zip(got, want, strict=True):
            assert (one.name, one.mechanism) == (other.name, other.mechanism)
            assert all(same_calls(a, b) for a, b in zip(one.calls, other.calls, strict=True))


def test_no_more_than_the_budget_is_kept() -> None:
    model, ids = mixed(), random_ids(2, 20)
    size = recorded(model, ids)[0].calls[0].nbytes
    most = 0

    class Watched(nn.Module):
        """Counts what is kept after each batch."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            nonlocal most
            out = self.model(ids)
            gc.collect()
            most = max(most, sum(call.nbytes for call in gc.get_objects() if type(call) is Call))
            return out

    layers = [len(layer.calls) for layer in Recording(Watched(), [ids] * 4, op="test", exact=True, memory=4 * size)]
    assert layers == [4, 4, 4]
    assert most == 2 * 4 * size  # the budget, and the layer before, which is in use until the next one comes


def test_layers_that_run_in_another_order() -> None:
    model = Pair(FavorAttention(8, 4, near=0, sinks=0), SoftmaxAttention(8))
    for memory in (2**20, 1):
        assert [layer.name for layer in recorded(model, qkv(), memory=memory)] == ["early", "late"]


def test_a_recording_can_be_read_again() -> None:
    recording = Recording(mixed(), [padded()], op="test", exact=True)
    first, second = list(recording), list(recording)
    assert len(recording) == len(first) == len(second) == 3
    assert all(same_calls(a.calls[0], b.calls[0]) for a, b in zip(first, second, strict=True))


def test_batches_may_come_from_an_iterator() -> None:
    def batches() -> Iterator[Tensor]:
        for length in (10, 20):
            yield random_ids(1, length)

    recording = Recording(mixed(), batches(), op="test", exact=True, memory=1)
    assert len(recording.batches) == 2
    assert [[call.q.shape[2] for call in layer.calls] for layer in recording] == [[10, 20]] * 3


def test_every_batch_of_every_run_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    ids = random_ids(1, 10)
    recorded(mixed(), ids, ids, memory=1, tell=lambda *what: told.append(what))
    assert told == [("running the model", 1, 2), ("running the model", 2, 2)] * 3


@pytest.mark.parametrize("estimator", ["calibrated", "hedgehog"])
def test_calibration_and_diagnosis_do_not_depend_on_the_budget(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [padded(), padded(3, 40)]
    found, defaults = [], Recording.__init__.__kwdefaults__ or {}
    for memory in (2**31, 1):
        monkeypatch.setattr(Recording.__init__, "__kwdefaults__", {**defaults, "memory": memory})
        model = mixed()
        runs = counted(model)
        report = subquad.calibrate(model, batches, progress=False, **brief(estimator))
        found.append((report, subquad.diagnose(model, batches, near=4, progress=False), model.state_dict(), len(runs)))
    (*large, weights, once), (*small, same, often) = found
    assert large == small
    assert all(torch.equal(x, same[name]) for name, x in weights.items())
    losses = 3 * len(batches)  # diagnose: as the model is, and without the far field of each of two layers
    assert (once, often) == (4 + losses, 10 + losses)


# What is computed once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["optimal", "hedgehog"])
def test_exact_outputs_are_computed_once(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model runs; the errors before and after, and training, take them from there."""
    made: list[int] = []
    softmax_attention = calls_module.softmax_attention

    def counting(*args: Any, **options: Any) -> Tensor:
        made.append(1)
        return softmax_attention(*args, **options)

    monkeypatch.setattr(calls_module, "softmax_attention", counting)
    subquad.calibrate(mixed(), [padded()] * 3, progress=False, **brief(estimator))
    assert len(made) == 3 * 3  # batches times layers


# Attention matrices ---------------------------------------------------------------------------------------------------


class Global(nn.Module):
    """Sliding windows whose first token sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.mechanism = WindowAttention(8, 2)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        x = inputs_embeds[:, None]
        return self.mechanism(x, x, x, global_mask=torch.arange(x.shape[2])[None] < 1)


def test_spectra_of_what_a_layer_is_given_beside_a_mask() -> None:
    x = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0))
    model = Global()
    heads = x[:, None]
    matrix = model.mechanism.attention_matrix(heads, heads, global_mask=torch.arange(9)[None] < 1)
    values = torch.linalg.svdvals(matrix[0]).double().cumsum(-1)
    assert_close(spectrum(model, {"inputs_embeds": x}).cumulative[0], values / values[..., -1:], 1e-12)


def test_spectrum_of_longformer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = LongformerSelfAttention(16, 2, window=2)

        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return self.attention(inputs_embeds)

    assert spectrum(Model(), {"inputs_embeds": torch.randn(1, 9, 16)}).cumulative.shape == (1, 2, 9)


# Errors ---------------------------------------------------------------------------------------------------------------


class Forgets(nn.Module):
    """Has attention, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.mechanism = SoftmaxAttention(8)

    def forward(self, x: Tensor) -> Tensor:
        return x


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a tensor alone": (
        lambda: Recording(mixed(), random_ids(1, 9), op="test", exact=True),
        "test: batches must be a list of batches, got Tensor; use [batch]",
    ),
    "no batches": (
        lambda: Recording(mixed(), iter([]), op="test", exact=True),
        "test: there are no batches; a few thousand tokens do",
    ),
    "no memory": (
        lambda: recorded(mixed(), random_ids(1, 9), memory=0),
        "test: memory must be a number of bytes above 0, got 0",
    ),
    "memory in words": (
        lambda: recorded(mixed(), random_ids(1, 9), memory="2 GiB"),
        "test: memory must be a number of bytes above 0, got '2 GiB'",
    ),
    "no attention": (
        lambda: recorded(nn.Linear(2, 2), torch.zeros(1, 2)),
        "test: Linear has no favor or softmax attention of subquad and is no Hugging Face model",
    ),
    "other attention": (
        lambda: recorded(make(SubquadModel, attention="linear"), random_ids(1, 9)),
        "test: SubquadModel has no favor or softmax attention",
    ),
    "attention that is not used": (
        lambda: recorded(Forgets(), torch.zeros(1, 2)),
        "test: Forgets ran, but its attention did not go through subquad or through the attention interface of "
        "transformers",
    ),
    "as the layer itself complains": (
        lambda: recorded(FavorAttention(8, 4, near=2), tuple(torch.zeros(1, 1, n, 8) for n in (3, 4, 4))),
        "favor: compares positions, so it needs as many queries as keys, got 3 and 4; use near=0 for cross-attention",
    ),
    "what is no tensor": (
        lambda: recorded(FavorAttention(8, 4), (1, 2, 3), exact=False),
        "favor: q must be a torch.Tensor, got int",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(errors.SubquadError) as raised:
        call()
    assert str(raised.value) == message
