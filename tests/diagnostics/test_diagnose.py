"""Diagnoses against numbers written down pair by pair, on our models and on those of Hugging Face; verdicts; texts."""

import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subquad
from fitted import brief
from subquad import FavorAttention, SoftmaxAttention, calibrate, diagnose, errors
from subquad.diagnostics import Diagnosis, LayerDiagnosis
from subquad.diagnostics.diagnosis import short_names
from subquad.diagnostics.probes import far_log_sums
from subquad.diagnostics.verdicts import CALIBRATE, FINE, SHARP, good, helps, settled
from subquad.models import SubquadForCausalLM, SubquadModel
from subquad.recording.baselines import WINDOW
from subquad.recording.calls import Call
from subquad.recording.record import Recording
from subquad.recording.samples import samples
from tiny_hugging_face import bert, gpt2, llama
from tiny_models import make, random_ids

H, K, D, T = 4, 2, 6, 40
ALL = 1000  # rows: more than there are


def cast(value: object) -> Any:
    return value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def asked(size: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with two query heads for each key head."""
    return size * normal(3, H, T, D), size * normal(3, K, T, D, seed=1), normal(3, K, T, 5, seed=2)


def ragged() -> Tensor:
    """Padding on the right, on the left, and in the middle."""
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[0, 31:], mask[1, :7], mask[2, 10:13] = False, False, False
    return mask


class Layer(nn.Module):
    """Attention that gets a mask by name."""

    def __init__(self, mechanism: nn.Module, causal: bool = False) -> None:
        super().__init__()
        self.mechanism, self.causal = mechanism, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mechanism(q, k, v, causal=self.causal, key_mask=mask)


# Numbers --------------------------------------------------------------------------------------------------------------


def fitted(estimator: str, kernel: str = "softmax", **options: Any) -> FavorAttention:
    """A small layer, calibrated where that is possible."""
    attention = FavorAttention(D, 12, near=4, sinks=3, num_heads=K, kernel=kernel).double()
    if estimator != "positive":
        q, k, v = (t.float() for t in asked())
        calibrate(attention, [(q, k, v)], **brief(estimator), **options)
    return attention


class Written:
    """One head of one sequence, pair by pair."""

    def __init__(self, attention: FavorAttention, q: Tensor, k: Tensor, real: list[int], causal: bool) -> None:
        o = attention.options
        self.rows, self.norms = [], [(o.scale**0.5 * t[real].norm(dim=-1)).tolist() for t in (q, k)]
        for place, i in enumerate(real):
            keys = [(at, j) for at, j in enumerate(real) if at <= place or not causal]
            x, y = o.scale**0.5 * q[i], o.scale**0.5 * k[[j for _, j in keys]]
            logits = y @ x - (y.square().sum(-1) / 2 if o.gaussian else 0)
            block = o.near or WINDOW
            close = torch.tensor([at < o.sinks or abs(at // block - place // block) <= 1 for at, _ in keys])
            far = ~close if o.near else torch.tensor([at >= o.sinks for at, _ in keys])
            self.rows.append((i, [j for _, j in keys], logits, close, far))


def log_features(attention: FavorAttention, x: Tensor, y: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """log phi `[M]` of one query and log psi `[S, M]` of its keys, from the tensors of the map."""
    m, f = attention.feature_map, cast(attention.features)
    query, key, bias = (t[head].detach().double() for t in (m.query, m.key, m.key_bias))
    if attention.transform:
        x, y = f.query_transform[head].double() @ x, y @ f.key_transform[head].double().mT
    phi, psi = query @ x, y @ key.mT
    if m.rule == "groups":
        phi, psi = (t.unflatten(-1, (2, -1)).log_softmax(-1).flatten(-2) for t in (phi, psi))
    else:
        phi, psi = phi - x @ x / 2, psi - y.square().sum(-1, keepdim=True) / 2
    return phi, psi + bias


def written_down(attention: FavorAttention, mask: Tensor | None, causal: bool) -> list[dict[str, float]]:
    """All numbers of a diagnosis, head by head."""
    q, k, v = asked()
    out = attention.reference(q, k, v, causal=causal, key_mask=mask).detach()
    found = []
    for h in range(H):
        sums: dict[str, list[float]] = {name: [] for name in ("q", "k", "logits", "entropy", "used")}
        wrong: dict[str, float] = dict.fromkeys(("error", "uniform", "near", "size"), 0.0)
        for b in range(3):
            real = list(range(T)) if mask is None else mask[b].nonzero()[:, 0].tolist()
            kh = h // (H // K)
            written = Written(attention, q[b, h], k[b, kh], real, causal)
            sums["q"] += written.norms[0]
            sums["k"] += written.norms[1]
            for i, keys, logits, close, far in written.rows:
                weights, values = logits.softmax(-1), v[b, kh, keys]
                exact = weights @ values
                near = logits[close].softmax(-1) @ values[close]
                for name, got in (("error", out[b, h, i]), ("uniform", values.mean(0)), ("near", near), ("size", 0)):
                    wrong[name] += float((got - exact).square().sum())
                sums["logits"] += logits.tolist()
                sums["entropy"].append(float(-(weights * weights.log()).sum()))
                if far.any():
                    root = attention.options.scale**0.5
                    y = root * k[b, kh, keys][far]
                    phi, psi = log_features(attention, root * q[b, h, i], y, kh)
                    psi = psi - (y.square().sum(-1, keepdim=True) / 2 if attention.options.gaussian else 0)
                    alpha = (phi + psi.logsumexp(0)).softmax(-1)
                    sums["used"].append(float(1 / alpha.square().sum()))
        mean = {name: math.fsum(values) / max(1, len(values)) for name, values in sums.items()}
        errors_ = {name: (wrong[name] / wrong["size"]) ** 0.5 for name in ("error", "uniform", "near")}
        found.append({**mean, **errors_, "low": min(sums["logits"]), "high": max(sums["logits"])})
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: fitted("positive"),
        lambda: FavorAttention(D, 12, near=0, sinks=3, num_heads=K),
        lambda: fitted("positive", kernel="gaussian"),
        lambda: fitted("calibrated", transform=True),
        lambda: fitted("hedgehog"),
    ],
    ids=["blocks", "no blocks", "gaussian", "transform", "learned"],
)
def test_numbers_are_those_written_down(make_layer: Callable, masked: bool, causal: bool) -> None:
    attention, mask = make_layer(), ragged() if masked else None
    (layer,) = diagnose(Layer(attention, causal), [(*asked(), mask)], rows=ALL).layers
    assert (layer.own, layer.near, layer.sinks) == (True, attention.options.near, 3)
    for head, want in zip(layer.heads, written_down(attention, mask, causal), strict=True):
        got = {
            "q": head.query_norm,
            "k": head.key_norm,
            "low": head.logit_min,
            "high": head.logit_max,
            "entropy": head.entropy,
            "used": head.effective_features,
            "error": head.error,
            "uniform": head.uniform_error,
            "near": head.near_error,
        }
        assert got == {name: pytest.approx(want[name], rel=1e-9) for name in got}


def test_rows_are_real_distinct_and_always_the_same() -> None:
    mask = ragged()
    call = Call(*asked(), causal=True, key_mask=mask, scale=1.0)
    found = list(samples([call, call], 10, seed=3))
    assert len(found) == 6
    assert all(len(set(s.rows.tolist())) == 10 for s in found)
    assert all(bool(mask[i % 3, s.rows].all()) for i, s in enumerate(found))
    again = list(samples([call, call], 10, seed=3))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(found, again, strict=True))
    assert not torch.equal(found[0].rows, found[3].rows)
    assert not torch.equal(found[0].rows, next(samples([call], 10, seed=4)).rows)


def test_exact_attention_is_computed_for_sampled_rows_only() -> None:
    """Memory of rows x length, not length squared."""
    shapes = [s.logits.shape for s in samples([Call(*asked(), causal=True, key_mask=None, scale=1.0)], 7, seed=0)]
    assert shapes == [(1, H, 7, T)] * 3
    few, many = (diagnose(FavorAttention(D, near=4), [asked()], rows=rows) for rows in (15, ALL))
    for a, b in zip(few.layers[0].heads, many.layers[0].heads, strict=True):
        assert a.entropy != b.entropy
        assert a.error == pytest.approx(b.error, rel=0.5)


def test_features_of_any_size_are_summed() -> None:
    """Rows whose far keys are smaller than those of other rows by thousands of nats."""
    log_psi = 3000 * normal(20, 5)
    far = torch.ones(20, 20, dtype=torch.bool).tril()
    want = torch.stack([log_psi[: i + 1].logsumexp(0) for i in range(20)])
    assert torch.allclose(far_log_sums(log_psi, far), want)


def test_half_precision_is_judged_as_it_is() -> None:
    attention = FavorAttention(D, near=4)
    exact, rough = (
        diagnose(attention, [tuple(t.to(dtype) for t in asked())]).layers[0].heads[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert rough.entropy == pytest.approx(exact.entropy, rel=1e-2)
    assert rough.error == pytest.approx(exact.error, rel=0.1)


# Models ---------------------------------------------------------------------------------------------------------------

FAMILIES = {
    "bert": (bert, "encoder.layer.0.attention.self"),
    "gpt2": (gpt2, "h.0.attn"),
    "llama": (llama, "layers.0.self_attn"),
}


@pytest.mark.parametrize(("make_model", "name"), FAMILIES.values(), ids=FAMILIES)
def test_hugging_face_models(make_model: Callable, name: str) -> None:
    """Entropies are those of the model's own weights; stand-ins are judged by their dense formula."""
    model, ids = make_model(), random_ids(2, 20)
    model.train()
    before = model.config._attn_implementation
    result = diagnose(model, [ids[:1], {"input_ids": ids[1:]}], rows=ALL, near=3, sinks=2, num_features=10)
    assert (model.training, model.config._attn_implementation) == (True, before)
    assert result.layers[0].name == name
    assert {(layer.own, layer.near, layer.sinks, layer.num_features) for layer in result.layers} == {(False, 3, 2, 10)}
    model.eval()
    recording = Recording(model, [ids], op="test", exact=False)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    assert len(weights) == len(result.layers)
    for layer, recorded, matrix in zip(result.layers, recording, weights, strict=True):
        want = -torch.special.xlogy(matrix, matrix).sum(-1).mean((0, 2))
        assert [head.entropy for head in layer.heads] == pytest.approx(want.tolist(), rel=1e-5)
        (asked_,) = recorded.calls
        exact = matrix @ asked_.v.repeat_interleave(4 // asked_.v.shape[1], 1)
        mean = torch.ones_like(matrix).tril() if asked_.causal else torch.ones_like(matrix)
        mean = mean / mean.sum(-1, keepdim=True) @ asked_.v.repeat_interleave(4 // asked_.v.shape[1], 1)
        uniform = (mean - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
        assert [head.uniform_error for head in layer.heads] == pytest.approx(uniform.sqrt().tolist(), rel=1e-5)
        assert all(0 < head.error < 5 for head in layer.heads)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("make_model", [bert, llama, lambda: make(SubquadModel, attention_options={"near": 3})])
def test_padding_changes_nothing(make_model: Callable, left: bool) -> None:
    model, ids = make_model(), random_ids(2, 25)
    mask = torch.zeros(2, 25, dtype=torch.long)
    mask[:, slice(8, 25) if left else slice(0, 17)] = 1
    options: dict[str, Any] = {} if isinstance(model, SubquadModel) else {"near": 3, "num_features": 10}
    places = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = diagnose(model, [{"input_ids": ids, "attention_mask": mask, **places}], rows=ALL, **options)
    alone = diagnose(model, [ids[mask.bool()].view(2, 17)], rows=ALL, **options)
    for one, other in zip(padded.layers, alone.layers, strict=True):
        for a, b in zip(one.heads, other.heads, strict=True):
            for name in ("query_norm", "key_norm", "logit_min", "logit_max", "entropy", "error", "uniform_error"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-6), name
            assert a.effective_features == pytest.approx(b.effective_features, rel=1e-6)


def test_our_models_are_judged_by_what_they_are_really_asked() -> None:
    """A second layer behind FAVOR, not behind exact attention; softmax layers by a stand-in."""
    mixed = {"attention": ["favor", "softmax"], "attention_options": [{"near": 4, "num_features": 8}, {}]}
    model, ids = make(SubquadForCausalLM, **mixed), random_ids(2, 30)
    result = diagnose(model, [ids], near=4, num_features=16, estimator="hyperbolic")
    assert [layer.own for layer in result.layers] == [True, False]
    assert [layer.estimator for layer in result.layers] == ["positive", "hyperbolic"]
    assert [layer.num_features for layer in result.layers] == [8, 16]
    real, exact = (list(Recording(model, [ids], op="test", exact=exact))[1].calls[0] for exact in (False, True))
    norms = (real.scale**0.5 * real.q.norm(dim=-1)).mean((0, 2))
    assert [head.query_norm for head in result.layers[1].heads] == pytest.approx(norms.tolist())
    assert not torch.allclose(real.q, exact.q)


def test_nothing_changes() -> None:
    model, ids = make(attention_options={"near": 4, "num_features": 8}), random_ids(2, 40)
    model.train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.random.get_rng_state()
    first, second = (diagnose(model, [ids]) for _ in "ab")
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_cross_attention_has_no_near_baseline() -> None:
    q, k, v = asked()
    for attention in (FavorAttention(D, near=0, sinks=2), SoftmaxAttention(D)):
        (layer,) = diagnose(Layer(attention), [(q[:, :, :9], k, v)]).layers
        assert layer.near == 0
        assert all(head.near_error is None for head in layer.heads)
        assert all(head.effective_features is not None for head in layer.heads)


def test_signed_features_have_no_shares() -> None:
    (layer,) = diagnose(FavorAttention(D, near=0, sinks=0, estimator="trigonometric"), [asked()]).layers
    assert all(head.effective_features is None for head in layer.heads)


def test_short_sequences_are_exact() -> None:
    result = diagnose(FavorAttention(D, near=20), [asked()])
    assert {head.verdict for head in result.layers[0].heads} == {FINE}
    assert {head.effective_features for head in result.layers[0].heads} == {None}
    assert result.summary == (
        "4 heads, tolerance 0.3: 4 fine; all is exact, no sequence reaches beyond near blocks and sinks"
    )


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_what_is_good() -> None:
    assert good(0.3, [0.9, 0.5], 0.3)
    assert not good(0.301, [0.9, 0.5], 0.3)
    assert good(0.24, [0.2, 0.05], 0.3)  # worse than one baseline only, and not clearly than the other
    assert not good(0.26, [0.2, 0.05], 0.3)
    assert good(0.099, [0.01, 0.02], 0.3)  # harmless
    assert not good(0.11, [0.01, 0.02], 0.3)
    assert not good(float("nan"), [0.5, 0.5], 0.3)


def test_what_helps() -> None:
    assert helps(0.3, 0.2, [0.9, 0.9], 0.3)
    assert helps(0.4, 0.6, [0.5, 0.9], 0.3)
    assert not helps(0.41, 0.6, [0.5, 0.9], 0.3)
    assert not helps(0.4, 0.49, [0.5, 0.9], 0.3)


def sharpened(size: float, shift: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """A shift of all queries and keys is nothing to exact attention and much to features drawn around zero."""
    q, k, v = normal(4, 2, 60, 8), normal(4, 2, 60, 8, seed=1), normal(4, 2, 60, 8, seed=2) + 1
    return size * q + shift, size * k + shift, v


CASES = {
    "small": (sharpened(0.5), FINE),
    "shifted": (sharpened(0.5, shift=2.5), CALIBRATE),
    "huge": (sharpened(12.0), SHARP),
}


@pytest.mark.parametrize(("inputs", "verdict"), CASES.values(), ids=CASES)
def test_verdicts(inputs: tuple[Tensor, ...], verdict: str) -> None:
    for batches in ([inputs], [tuple(t[:2] for t in inputs), tuple(t[2:] for t in inputs)]):
        (layer,) = diagnose(FavorAttention(8, 64, near=0, sinks=0, num_heads=2), batches).layers
        assert [head.verdict for head in layer.heads] == [verdict] * 2
        assert all((head.calibrated_error is None) == (verdict == FINE) for head in layer.heads)
        assert layer.verdict == verdict


def test_a_trial_is_measured_on_the_other_half() -> None:
    """What it was fitted to has another place than what it is measured on."""
    here, there = sharpened(0.5, shift=3.5), sharpened(0.5, shift=-3.5)
    attention = FavorAttention(8, 64, near=0, sinks=0, num_heads=2)
    for batches, verdict in (([here, here], CALIBRATE), ([here, there], SHARP)):
        (layer,) = diagnose(attention, [(q[:1], k[:1], v[:1] - 1) for q, k, v in batches]).layers
        assert [head.verdict for head in layer.heads] == [verdict] * 2


def test_calibrated_layers_are_not_told_to_calibrate() -> None:
    inputs = sharpened(0.5, shift=2.5)
    attention = FavorAttention(8, 64, near=0, sinks=0, num_heads=2)
    calibrate(attention, [inputs])
    other = sharpened(0.5, shift=-2.5)
    (layer,) = diagnose(attention, [other]).layers
    assert layer.settled
    assert [(head.verdict, head.calibrated_error) for head in layer.heads] == [(SHARP, None)] * 2
    (layer,) = diagnose(attention, [inputs]).layers
    assert layer.verdict == FINE


def test_the_advice_is_good_advice() -> None:
    """Heads in need of calibration are better off after it."""
    inputs = sharpened(0.5, shift=2.5)
    attention = FavorAttention(8, 64, near=0, sinks=0, num_heads=2)
    before = diagnose(attention, [inputs]).layers[0].heads
    calibrate(attention, [inputs])
    after = diagnose(attention, [inputs]).layers[0].heads
    for one, other in zip(before, after, strict=True):
        assert one.calibrated_error is not None
        assert max(one.calibrated_error, other.error) < one.error / 2


@pytest.mark.filterwarnings("ignore::subquad.errors.UncalibratedWarning")
def test_which_features_are_settled() -> None:
    inputs = [tuple(t.float() for t in sharpened(0.5))]
    for estimator in ("positive", "hyperbolic", "trigonometric", "optimal", "sharp", "calibrated"):
        attention = FavorAttention(8, 16, near=0, sinks=0, estimator=estimator)
        attention.redraw(5)
        assert not settled(attention)
    for estimator in ("optimal", "sharp", "calibrated", "hedgehog", "exponential"):
        attention = FavorAttention(8, 16, near=8, sinks=0)
        calibrate(attention, inputs, **brief(estimator, 1))
        assert settled(attention) == (estimator not in ("optimal", "sharp"))
    assert not settled(FavorAttention(8, 16, estimator="hedgehog"))
    assert not settled(FavorAttention(8, 16, estimator="exponential"))


def test_heads_that_never_look_far_away_can_be_fitted() -> None:
    """All attention is on the own token: far weights are exactly zero, and means of nothing would be no numbers."""
    q = 60 * torch.nn.functional.normalize(normal(2, 1, 60, 8), dim=-1).float()
    layer = FavorAttention(8, 16, near=4, sinks=0)
    (found,) = diagnose(layer, [(q, q, q)]).layers
    assert math.isfinite(found.heads[0].error)
    calibrate(layer, [(q, q, q)])
    assert bool(layer.feature_map.query.isfinite().all())


# Texts, files, pictures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> Diagnosis:
    return diagnose(make(attention_options={"near": 4, "num_features": 8}), [random_ids(2, 40)])


def test_text(result: Diagnosis) -> None:
    lines = str(result).splitlines()
    assert lines[0] == result.summary
    assert lines[1].split() == ["layer", "head", "|q|", "|k|", *lines[1].split()[4:]]
    assert len(lines) == 1 + 1 + 8 + 1 + 1 + 2
    assert lines[2].startswith("layers.0 ")
    head = result.layers[0].heads[0]
    assert f"{head.error:.3f}" in lines[2]
    assert "entropy: of exact attention, nats" in lines[10]
    assert lines[11] == "far field:"
    total = sum(result.count(verdict) for verdict in (FINE, CALIBRATE, SHARP))
    assert total == 8


def test_table(result: Diagnosis) -> None:
    from rich.console import Console

    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(result.table())
    shown = console.export_text()
    assert result.summary in " ".join(shown.split())
    for layer in result.layers:
        for head in layer.heads:
            assert f"{head.error:.3f}" in shown
    assert shown.count("calibrat") >= result.count(CALIBRATE)
    assert result.table().columns[-1].min_width == len("calibration")  # narrow terminals break lines between words
    assert result.table().padding == (0, 0, 0, 0)  # nor is there room for more than a blank between columns


def test_summary_names_every_verdict(result: Diagnosis) -> None:
    one = result.layers[0].heads[0]
    heads = [replace(one, verdict=verdict) for verdict in (FINE, CALIBRATE, SHARP, SHARP)]
    layer = LayerDiagnosis("a", True, "positive", 8, 4, 4, False, tuple(heads))
    assert layer.verdict == SHARP
    assert Diagnosis(0.3, 64, 1, (layer,)).summary == (
        "4 heads, tolerance 0.3: 1 fine, 1 in need of calibration (subquad.calibrate), 2 too sharp for random features "
        "(keep exact attention there, or learn the features)"
    )


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["favor"], ["favor"]),
        (["layers.0.attention.mechanism", "layers.1.attention.mechanism"], ["layers.0", "layers.1"]),
        (["encoder.layer.0.self", "encoder.layer.10.self"], ["layer.0", "layer.10"]),
        (["encoder.layers.0.attn", "decoder.layers.0.attn"], ["encoder", "decoder"]),
        (["one", "two.deep"], ["one", "two.deep"]),
        (["a.b", "a.b.c"], ["a.b", "a.b.c"]),
    ],
)
def test_short_names(names: list[str], want: list[str]) -> None:
    layers = tuple(LayerDiagnosis(name, True, "positive", 8, 4, 4, False, ()) for name in names)
    assert short_names(Diagnosis(0.3, 64, 1, layers)) == want


def test_saved(result: Diagnosis, tmp_path: Path) -> None:
    result.save(tmp_path / "heads.json")
    record = json.loads((tmp_path / "heads.json").read_text())
    assert record["tolerance"] == 0.3
    assert (record["rows"], record["sequences"], record["summary"]) == (64, 2, result.summary)
    assert record["layers"][1]["heads"][2]["error"] == result.layers[1].heads[2].error
    assert record["layers"][0]["estimator"] == "positive"


def test_plotted(result: Diagnosis, tmp_path: Path) -> None:
    for name in ("a.png", "b.svg"):
        result.plot(tmp_path / name, title="a model")
        assert (tmp_path / name).stat().st_size > 5000
    fewer = replace(result.layers[1], heads=result.layers[1].heads[:2])
    replace(result, layers=(result.layers[0], fewer)).plot(tmp_path / "c.png")


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    layer = FavorAttention(D, 8, near=4)
    diagnose(layer, [asked(), asked()], progress=lambda *what: told.append(what))
    assert told == [("running the model", 1, 2), ("running the model", 2, 2), ("measuring favor", 0, 1)]
    told.clear()
    calibrate(layer, [asked()], progress=lambda *what: told.append(what))
    assert told == [("running the model", 1, 1), ("fitting favor", 0, 1), ("done", 1, 1)]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for progress, terminal in ((True, Terminal()), (False, Terminal()), (True, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", terminal)
        diagnose(layer, [asked()], progress=progress)
        assert ("measuring favor" in terminal.getvalue()) == (progress and terminal.isatty())


# Errors ---------------------------------------------------------------------------------------------------------------


layer = FavorAttention(D, 8, near=4)
ERRORS: dict[str, tuple[Callable[[], object], type, str]] = {
    "rows": (
        lambda: diagnose(layer, [asked()], rows=0),
        errors.ConfigError,
        "diagnose: rows must be a whole number of at least 1, got 0",
    ),
    "tolerance": (
        lambda: diagnose(layer, [asked()], tolerance=1.5),
        errors.ConfigError,
        "diagnose: tolerance must lie between 0 and 1, got 1.5",
    ),
    "seed": (
        lambda: diagnose(layer, [asked()], seed=-1),
        errors.ConfigError,
        "diagnose: seed must be a whole number of at least 0, got -1",
    ),
    "estimator": (
        lambda: diagnose(bert(), [random_ids(1, 9)], estimator="calibrated"),
        errors.ConfigError,
        "diagnose: estimator must be one of positive, hyperbolic, trigonometric, got 'calibrated'",
    ),
    "near": (
        lambda: diagnose(bert(), [random_ids(1, 9)], near=-1),
        errors.ConfigError,
        "favor: near must be a whole number of at least 0, got -1",
    ),
    "features": (
        lambda: diagnose(bert(), [random_ids(1, 9)], estimator="hyperbolic", num_features=3),
        errors.ConfigError,
        "favor: estimator='hyperbolic' uses every row with both signs, so num_features must be even, got 3",
    ),
    "unused": (
        lambda: diagnose(layer, [asked()], near=4, num_features=8),
        errors.ConfigError,
        "diagnose: num_features, near is for layers with exact attention, but all of these are FAVOR and are judged as "
        "they are; leave it out",
    ),
    "no batches": (
        lambda: diagnose(layer, []),
        errors.ConfigError,
        "diagnose: there are no batches; a few thousand tokens do",
    ),
    "one batch": (
        lambda: diagnose(layer, cast(random_ids(1, 9))),
        errors.DtypeError,
        "diagnose: batches must be a list of batches, got Tensor; use [batch]",
    ),
    "no attention": (
        lambda: diagnose(nn.Linear(3, 3), [torch.ones(3)]),
        errors.ConfigError,
        "diagnose: Linear has no favor or softmax attention of subquad and is no Hugging Face model",
    ),
    "other attention": (
        lambda: diagnose(make(attention="linear"), [random_ids(1, 9)]),
        errors.ConfigError,
        "diagnose: SubquadForCausalLM has no favor or softmax attention",
    ),
    "folder": (
        lambda: diagnose(layer, [asked()]).save("no/x.json"),
        errors.DataError,
        "no/x.json: cannot be written (No such file or directory)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], object], kind: type, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_public_names() -> None:
    assert subquad.diagnose is diagnose
