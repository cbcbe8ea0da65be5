"""Every error a user can meet, word for word: what was asked, what came, what to do."""

import ast
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import subquad
from subquad import MECHANISMS, FavorAttention, IdentityAttention, LinearAttention, SoftmaxAttention, attention, errors
from subquad.features import draw_feature_map
from subquad.features.proposals import prior
from subquad.functional import favor_attention, linear_attention, softmax_attention
from subquad.mechanisms.linear import LinearState

x = torch.randn(2, 4, 5, 8)
soft = SoftmaxAttention(8)
favor = FavorAttention(8, 16)
paper = FavorAttention(8, 16, near=0, sinks=0)
linear = LinearAttention(8)
drawn = draw_feature_map(8, 16)
mask = torch.ones(2, 5, dtype=torch.bool)


class Unfit(IdentityAttention):
    supports_causal = False
    supports_state = False


def cast(value: object) -> Any:
    """Something of the wrong type, past the type checker."""
    return value


FLOATS = "float16, bfloat16, float32, float64"

TENSORS = {
    "not a tensor": (lambda: soft(cast([1.0]), x, x), errors.DtypeError, "softmax: q must be a torch.Tensor, got list"),
    "three dims": (
        lambda: soft(x[0], x, x),
        errors.ShapeError,
        "softmax: q must be [batch, heads, length, dim], got [4, 5, 8]",
    ),
    "empty": (
        lambda: soft(x[:, :, :0], x, x),
        errors.ShapeError,
        "softmax: q must have no empty dimension, got [2, 4, 0, 8]",
    ),
    "integers": (lambda: soft(x.int(), x, x), errors.DtypeError, f"softmax: q must be one of {FLOATS}, got int32"),
    "two dtypes": (
        lambda: favor(x, x, x.double()),
        errors.DtypeError,
        "favor: q, k and v must share one dtype, got float32, float32, float64; cast them to one",
    ),
    "two dtypes of q and k": (
        lambda: favor.attention_matrix(x, x.half()),
        errors.DtypeError,
        "favor: q and k must share one dtype, got float32, float16; cast them to one",
    ),
    "two devices": (
        lambda: linear(x, x, x.to("meta")),
        errors.BackendError,
        "linear: q, k and v must be on one device, got cpu, cpu, meta",
    ),
    "batch": (
        lambda: soft(x, x[:1], x[:1]),
        errors.ShapeError,
        "softmax: q and k must share the batch size, got q [2, 4, 5, 8] and k [1, 4, 5, 8]",
    ),
    "head dim": (
        lambda: soft(x, x[..., :4], x),
        errors.ShapeError,
        "softmax: q and k must share the head dim (last), got q [2, 4, 5, 8] and k [2, 4, 5, 4]",
    ),
    "heads": (
        lambda: soft(x, x[:, :3], x[:, :3]),
        errors.ShapeError,
        "softmax: the heads of q must be a multiple of those of k and v, got 4 and 3; "
        "the layout is [batch, heads, length, dim]",
    ),
    "value length": (
        lambda: soft(x, x, x[:, :, :3]),
        errors.ShapeError,
        "softmax: v must have the batch, heads and length of k, got k [2, 4, 5, 8] and v [2, 4, 3, 8]",
    ),
    "made for another head dim": (
        lambda: SoftmaxAttention(16)(x, x, x),
        errors.ShapeError,
        "softmax: made for head_dim=16, got q [2, 4, 5, 8]",
    ),
    "causal lengths": (
        lambda: linear(x[:, :, :3], x, x, causal=True),
        errors.ShapeError,
        "linear: causal=True needs as many queries as keys, got 3 and 5; "
        "to continue a sequence, use extend(q, k, v, state)",
    ),
    "extend lengths": (
        lambda: linear.extend(x[:, :, :3], x, x),
        errors.ShapeError,
        "linear: extend takes the new tokens only, as many queries as keys, got 3 and 5",
    ),
    "cross-attention with near blocks": (
        lambda: favor(x[:, :, :3], x, x),
        errors.ShapeError,
        "favor: compares positions, so it needs as many queries as keys, got 3 and 5; use near=0 for cross-attention",
    ),
    "cross-attention in the function": (
        lambda: favor_attention(x[:, :, :3], x, x, draw_feature_map(8)),
        errors.ShapeError,
        "favor: compares positions, so it needs as many queries as keys, got 3 and 5; use near=0 for cross-attention",
    ),
    "cross-attention of the identity": (
        lambda: IdentityAttention(8)(x[:, :, :3], x, x),
        errors.ShapeError,
        "identity: compares positions, so it needs as many queries as keys, got 3 and 5",
    ),
    "rows": (
        lambda: soft.attention_matrix(x, x, rows=torch.zeros(1, 1)),
        errors.ShapeError,
        "softmax: rows must be a 1-D int64 tensor of query positions, got float32 [1, 1]",
    ),
    "rows beyond": (
        lambda: soft.attention_matrix(x, x, rows=torch.tensor([0, 5])),
        errors.ShapeError,
        "softmax: rows must lie in 0..4, got 0..5",
    ),
    "state of another mechanism": (
        lambda: linear.extend(x, x, x, soft.extend(x, x, x)[1]),
        errors.ShapeError,
        "linear: state must be a LinearState returned by extend, got SoftmaxState",
    ),
    "state of another batch": (
        lambda: soft.extend(x[:1], x[:1], x[:1], soft.extend(x, x, x)[1]),
        errors.ShapeError,
        "softmax: state.k must be [1, 4, any, 8] for these inputs, got [2, 4, 5, 8]; "
        "it comes from another batch or mechanism",
    ),
    "state of another dtype": (
        lambda: soft.extend(x.double(), x.double(), x.double(), soft.extend(x, x, x)[1]),
        errors.DtypeError,
        "softmax: state.k is float32, but q, k and v are float64; keep one dtype per sequence",
    ),
    "state elsewhere": (
        lambda: linear.extend(x, x, x, LinearState(*(t.to("meta") for t in linear.extend(x, x, x)[1]))),
        errors.BackendError,
        "linear: state.far_max is on meta, k on cpu; move one of them",
    ),
    "no feature map": (
        lambda: favor_attention(x, x, x, cast(x)),
        errors.DtypeError,
        "favor: feature_map must be a subquad.FeatureMap, got Tensor",
    ),
    "key weights of another size": (
        lambda: favor_attention(x, x, x, drawn._replace(key=drawn.key[:, :3])),
        errors.ShapeError,
        "favor: key of the feature map must be [1, 16, 8] like its query weights, got [1, 3, 8]",
    ),
    "half an offset": (
        lambda: favor_attention(x, x, x, drawn._replace(offset_weight=torch.zeros(1, 8))),
        errors.ShapeError,
        "favor: offset_bias of the feature map must be [1] like its query weights, got None",
    ),
    "function of the wrong rank": (
        lambda: LinearAttention(8, feature_map=lambda x: x.sum(-1))(x, x, x),
        errors.ShapeError,
        "linear: feature_map must map [2, 4, 5, 8] to [2, 4, 5, M], got [2, 4, 5]",
    ),
    "feature map of another head dim": (
        lambda: favor_attention(x, x, x, draw_feature_map(16)),
        errors.ShapeError,
        "favor: the feature map is for head_dim=16, got q [2, 4, 5, 8]",
    ),
    "feature map of other heads": (
        lambda: favor_attention(x, x, x, draw_feature_map(8, num_heads=3)),
        errors.ShapeError,
        "favor: the feature map has 3 heads, but k has 4 and q 4; make it with num_heads = the heads of k",
    ),
    "feature map elsewhere": (
        lambda: FavorAttention(8, 16).to("meta")(x, x, x),
        errors.BackendError,
        "favor: the feature map is on meta, q on cpu; move one of them",
    ),
    "projection of other heads": (
        lambda: LinearAttention(8, num_features=16, num_heads=3)(x, x, x),
        errors.ShapeError,
        "linear: the projection has 3 heads, but k has 4; make it with num_heads = the heads of k",
    ),
    "projection of other dim": (
        lambda: linear_attention(x, x, x, projection=torch.randn(1, 16, 4)),
        errors.ShapeError,
        "linear: the projection must be [1 or 4, features, 8], got [1, 16, 4]",
    ),
    "projection elsewhere": (
        lambda: LinearAttention(8, num_features=16).to("meta")(x, x, x),
        errors.BackendError,
        "linear: the projection is on meta, k on cpu; move one of them",
    ),
}

MASKS = {
    "not a tensor": (
        lambda: linear(x, x, x, key_mask=cast([True])),
        errors.MaskError,
        "linear: key_mask must be a bool tensor, got list",
    ),
    "floats": (
        lambda: linear(x, x, x, key_mask=mask.float()),
        errors.MaskError,
        "linear: key_mask must be bool, True where the token is real, got float32; use mask.bool() if 1 means real",
    ),
    "shape": (
        lambda: favor(x, x, x, key_mask=mask[:, :3]),
        errors.MaskError,
        "favor: key_mask must be [batch, keys] = [2, 5], got [2, 3]",
    ),
    "device": (
        lambda: favor(x, x, x, key_mask=mask.to("meta")),
        errors.BackendError,
        "favor: key_mask must be on the device of k, got meta and cpu",
    ),
}

OPTIONS = {
    "causal": (lambda: favor(x, x, x, causal=cast("yes")), "favor: causal must be True or False, got 'yes'"),
    "not causal": (
        lambda: Unfit(8)(x, x, x, causal=True),
        "identity: cannot be causal, every output depends on all tokens; use causal=False",
    ),
    "no state": (
        lambda: Unfit(8).extend(x, x, x),
        "identity: cannot extend a sequence, it has no state; use forward on the whole",
    ),
    "rule": (
        lambda: favor_attention(x, x, x, drawn._replace(rule="norms")),
        "favor: the rule of the feature map must be one of none, norm, groups, got 'norms' (did you mean 'norm'?)",
    ),
    "groups": (
        lambda: favor_attention(x, x, x, drawn._replace(groups=5)),
        "favor: groups=5 of the feature map needs rule='groups' and a multiple of 5 features, got rule='norm' and 16",
    ),
    "drawn heads": (
        lambda: draw_feature_map(8, num_heads=0),
        "favor: num_heads must be a whole number of at least 1, got 0",
    ),
    "drawn dim": (lambda: draw_feature_map(-1), "favor: head_dim must be a whole number of at least 1, got -1"),
    "unknown name": (
        lambda: attention("favour", head_dim=8),
        f"unknown attention 'favour' (did you mean 'favor'?); known: {', '.join(m.name for m in MECHANISMS)}",
    ),
    "unknown option": (
        lambda: attention("linear", head_dim=8, features=3),
        "linear: unknown option 'features' (did you mean 'num_features'?); options: feature_map, num_features, "
        "coupling, "
        "num_heads, scale, seed, backend, chunk",
    ),
    "zero": (
        lambda: FavorAttention(8, 0),
        "favor: num_features must be a whole number of at least 1, got 0",
    ),
    "negative": (lambda: FavorAttention(8, near=-1), "favor: near must be a whole number of at least 0, got -1"),
    "negative sinks": (
        lambda: FavorAttention(8, sinks=-1),
        "favor: sinks must be a whole number of at least 0, got -1",
    ),
    "NaN count": (
        lambda: FavorAttention(cast(math.nan)),
        "favor: head_dim must be a whole number of at least 1, got nan",
    ),
    "bool count": (
        lambda: SoftmaxAttention(True),
        "softmax: head_dim must be a whole number of at least 1, got True",
    ),
    "zero head dim": (
        lambda: IdentityAttention(0),
        "identity: head_dim must be a whole number of at least 1, got 0",
    ),
    "zero chunk": (lambda: LinearAttention(8, chunk=0), "linear: chunk must be a whole number of at least 1, got 0"),
    "zero heads": (
        lambda: FavorAttention(8, num_heads=0),
        "favor: num_heads must be a whole number of at least 1, got 0",
    ),
    "negative seed": (lambda: FavorAttention(8, seed=-1), "favor: seed must be a whole number of at least 0, got -1"),
    "negative seed of linear": (
        lambda: LinearAttention(8, num_features=4, seed=-1),
        "linear: seed must be a whole number of at least 0, got -1",
    ),
    "NaN scale": (
        lambda: SoftmaxAttention(8, scale=math.nan),
        "softmax: scale must be a positive finite number, got nan",
    ),
    "negative scale": (
        lambda: softmax_attention(x, x, x, scale=-1.0),
        "softmax: scale must be a positive finite number, got -1.0",
    ),
    "infinite scale": (
        lambda: FavorAttention(8, scale=math.inf),
        "favor: scale must be a positive finite number, got inf",
    ),
    "estimator": (
        lambda: FavorAttention(8, estimator="positiv"),
        "favor: estimator must be one of positive, hyperbolic, trigonometric, optimal, sharp, calibrated, hedgehog, "
        "exponential, got 'positiv' (did you mean 'positive'?)",
    ),
    "coupling": (
        lambda: FavorAttention(8, coupling="haar"),
        "favor: coupling must be one of iid, orthogonal, simplex, hadamard, got 'haar' (did you mean 'hadamard'?)",
    ),
    "coupling of linear": (
        lambda: LinearAttention(8, num_features=4, coupling="ortho"),
        "linear: coupling must be one of iid, orthogonal, simplex, hadamard, got 'ortho' (did you mean 'orthogonal'?)",
    ),
    "kernel": (
        lambda: FavorAttention(8, kernel="rbf"),
        "favor: kernel must be one of softmax, gaussian, got 'rbf'",
    ),
    "backend": (
        lambda: LinearAttention(8, backend="cuda"),
        "linear: backend must be one of auto, cpu, torch, got 'cuda'",
    ),
    "coupling for powers of two": (
        lambda: FavorAttention(12, coupling="hadamard"),
        "favor: coupling='hadamard' needs a head_dim that is a power of two from 32 on, got 12",
    ),
    "coupling for many dims": (
        lambda: LinearAttention(16, num_features=8, coupling="hadamard"),
        "linear: coupling='hadamard' needs a head_dim that is a power of two from 32 on, got 16",
    ),
    "coupling for two dims": (
        lambda: FavorAttention(1, coupling="simplex"),
        "favor: coupling='simplex' needs a head_dim of at least 2, got 1",
    ),
    "odd softmax": (
        lambda: FavorAttention(8, 15, estimator="hedgehog"),
        "favor: estimator='hedgehog' is a softmax of W x and one of -W x, so num_features must be even, got 15",
    ),
    "transform of a plain draw": (
        lambda: FavorAttention(8, transform=True),
        "favor: transform=True needs estimator='calibrated', got 'positive'",
    ),
    "transform and norms": (
        lambda: FavorAttention(8, estimator="calibrated", transform=True, kernel="gaussian"),
        "favor: transform=True leaves q.k as it is, but not the norms that kernel='gaussian' needs",
    ),
    "redraw of learned features": (
        lambda: FavorAttention(8, estimator="hedgehog").redraw(1),
        "favor: estimator='hedgehog' is learned, there is nothing to redraw; use subquad.calibrate",
    ),
    "proposal with mirrored rows": (
        lambda: draw_feature_map(8, 16, estimator="hyperbolic", proposal=prior(1, 8, 0.1)),
        "favor: a proposal goes with estimator='positive', got 'hyperbolic'",
    ),
    "odd hyperbolic": (
        lambda: FavorAttention(8, 15, estimator="hyperbolic"),
        "favor: estimator='hyperbolic' uses every row with both signs, so num_features must be even, got 15",
    ),
    "trigonometric with near blocks": (
        lambda: FavorAttention(8, estimator="trigonometric"),
        "favor: estimator='trigonometric' has signed features, which cannot share a normaliser with exact weights; "
        "use near=0, sinks=0, got near=64, sinks=4",
    ),
    "projection options without one": (
        lambda: LinearAttention(8, seed=3),
        "linear: seed belongs to the random projection; give num_features too, or leave it out",
    ),
    "scale without projection": (
        lambda: linear_attention(x, x, x, scale=1.0),
        "linear: scale belongs to the random projection; give num_features too, or leave it out",
    ),
    "redraw without projection": (
        lambda: linear.redraw(1),
        "linear: nothing to redraw without a random projection; give num_features",
    ),
    "feature map": (
        lambda: LinearAttention(8, feature_map="elu"),
        "linear: feature_map must be one of elu1, relu, softplus, relu2, exp or a function of a tensor, got 'elu' "
        "(did you mean 'elu1'?)",
    ),
}


def raised(call: Callable[[], object]) -> errors.SubquadError:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("call", "kind", "message"), [*TENSORS.values(), *MASKS.values()], ids=[*TENSORS, *MASKS])
def test_tensor_errors(call: Callable[[], object], kind: type, message: str) -> None:
    error = raised(call)
    assert (type(error), str(error)) == (kind, message)


@pytest.mark.parametrize(("call", "message"), OPTIONS.values(), ids=OPTIONS)
def test_option_errors(call: Callable[[], object], message: str) -> None:
    error = raised(call)
    assert (type(error), str(error)) == (errors.ConfigError, message)


@pytest.mark.parametrize("mechanism", [favor, paper, linear, LinearAttention(8, feature_map="exp")])
def test_second_derivatives_are_refused(mechanism: subquad.Mechanism) -> None:
    q = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mechanism(q, q, q).square().sum(), q, create_graph=True)
    error = raised(lambda: gradient.sum().backward())
    assert str(error) == (
        "subquad: second derivatives are not implemented in the fast engine; "
        "differentiate mechanism.reference(...) twice"
    )
    (gradient,) = torch.autograd.grad(mechanism.reference(q, q, q).square().sum(), q, create_graph=True)
    gradient.sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def dual(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(x[None]),
    "grad": lambda f: torch.func.grad(lambda q: f(q).sum())(x),
    "jvp": lambda f: torch.func.jvp(f, (x,), (x,)),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda q: f(q).sum()))(x[None]),
    "dual": dual,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on the way into forward mode
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("mechanism", [favor, paper, linear], ids=["favor", "favor-paper", "linear"])
def test_transforms_are_refused(mechanism: subquad.Mechanism, transform: Callable) -> None:
    """Forward mode above all: torch gives zeros for an operator that does not know it."""
    for function in (lambda q: mechanism(q, q, q), lambda q: mechanism.extend(*[q[:, :, :1]] * 3)[0]):
        assert str(raised(lambda function=function: transform(function))) == (
            "subquad: torch.func transforms (vmap, grad, jvp) and forward-mode derivatives are not supported by the "
            "fast engine; fold a mapped dimension into the batch, use torch.autograd.grad, or mechanism.reference(...)"
        )


def test_errors_are_the_builtin_ones_too() -> None:
    for kind, builtin in (("ShapeError", ValueError), ("MaskError", ValueError), ("ConfigError", ValueError)):
        assert issubclass(getattr(errors, kind), builtin)
    assert issubclass(errors.DtypeError, TypeError)
    assert issubclass(errors.BackendError, RuntimeError)


def test_every_error_is_worded_in_checks() -> None:
    """No other module builds an error of its own; each function in checks is used."""
    sources = {path: path.read_text() for path in Path(subquad.__file__).parent.rglob("*.py")}
    own = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    for path, source in sources.items():
        if "checks" in path.parts or path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in own, f"{path.name} builds a {node.func.id}"
    defined = {
        (path.stem, node.name)
        for path, source in sources.items()
        if "checks" in path.parts
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Attribute, ast.Name))
    }
    assert {name for _, name in defined if name not in used} == set()
