"""Linformer: the contract in every configuration, what its errors say, Theorem 1, and its scale."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from subquad import LinearAttention, LinformerAttention, Mechanism, SoftmaxAttention, attention, errors
from subquad.functional import linformer_attention
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract

D, RANK, LONGEST = 6, 9, 72


def make(rank: int = RANK, **options: Any) -> LinformerAttention:
    torch.manual_seed(0)
    return LinformerAttention(D, rank, **{"max_length": LONGEST, **options})


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "learned-none": {"sharing": "none", "num_heads": 3},
    "learned-headwise": {"sharing": "headwise"},
    "learned-key-value": {"sharing": "key_value"},
    "learned-layerwise": {"sharing": "layerwise", "scale": 0.7},
    "learned-more-slots-than-tokens": {"rank": 100},
    "convolution-none": {"projection": "convolution", "sharing": "none", "num_heads": 2},
    "convolution-headwise": {"projection": "convolution"},
    "convolution-key-value": {"projection": "convolution", "sharing": "key_value", "rank": 24},
    "mean": {"projection": "mean"},
    "mean-of-one-token": {"projection": "mean", "rank": LONGEST},
    "gaussian-none": {"projection": "gaussian", "sharing": "none", "num_heads": 2, "seed": 3},
    "gaussian-headwise": {"projection": "gaussian"},
    "gaussian-key-value": {"projection": "gaussian", "sharing": "key_value"},
    "linear-learned-none": {"kernel": "linear", "sharing": "none", "num_heads": 2},
    "linear-learned-key-value": {"kernel": "linear", "sharing": "key_value"},
    "linear-convolution": {"kernel": "linear", "projection": "convolution"},
    "linear-mean": {"kernel": "linear", "projection": "mean"},
    "linear-gaussian": {"kernel": "linear", "projection": "gaussian", "sharing": "key_value"},
}


@parametrize_contract({name: lambda options=options: make(**options) for name, options in CONFIGURATIONS.items()})
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


# Projections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["mean", "convolution"])
def test_blocks_that_are_padding_in_every_sequence_are_not_seen(projection: str) -> None:
    mechanism = make(projection=projection)
    inputs = make_inputs(mechanism, 50, batch=3)
    mask = torch.arange(50) < torch.tensor([[20], [7], [0]])  # the fourth block, of eight tokens, has none
    out = mechanism(*inputs, key_mask=mask)
    assert_close(out, mechanism.reference(*inputs, key_mask=mask), 1e-12)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("heads", [None, 2])
def test_function_is_the_module(heads: int | None) -> None:
    mechanism = make(sharing="none", num_heads=heads) if heads else make()
    assert mechanism.e is not None
    assert mechanism.f is not None
    e, f = (mechanism.e, mechanism.f) if heads else (mechanism.e[0], mechanism.f[0])
    inputs = make_inputs(mechanism, 50, batch=2)
    mask = torch.arange(50) < torch.tensor([[50], [7]])
    assert_close(linformer_attention(*inputs, e, f, key_mask=mask), mechanism(*inputs, key_mask=mask), 1e-12)


def test_mean_of_single_tokens_is_exact_attention() -> None:
    mechanism = make(projection="mean", rank=LONGEST)
    inputs = make_inputs(mechanism, 50)
    assert_close(mechanism(*inputs), SoftmaxAttention(D)(*inputs), 1e-10)


@pytest.mark.parametrize("projection", ["mean", "convolution"])
def test_slots_without_tokens_take_no_weight(projection: str) -> None:
    """Room for longer sequences changes nothing: it is the size of the blocks that counts."""
    short, long = (make(rank, max_length=8 * rank, projection=projection) for rank in (9, 90))
    long.load_state_dict(short.state_dict())
    inputs = make_inputs(short, 50)
    assert_close(long(*inputs), short(*inputs), 1e-12)


@pytest.mark.parametrize("projection", ["learned", "convolution"])
@pytest.mark.parametrize("longest", [128, 1024])
def test_projected_keys_are_as_large_as_keys(projection: str, longest: int) -> None:
    """On average over initial weights, at the full length: logits of a fresh model do not depend on `max_length`."""
    mechanism = make(16, max_length=longest, projection=projection)
    k = torch.randn(1, 2, longest, D)
    ratios = []
    for seed in range(100):
        torch.manual_seed(seed)
        mechanism.reset_parameters()
        ratios += [mechanism._slots(k, w, None).square().mean() / k.square().mean() for w in mechanism._weights()]
    every = torch.stack(ratios).detach()
    assert abs(every.mean() - 1) < 4 * every.std() / len(ratios) ** 0.5


def test_gaussian_projection_is_drawn_saved_and_kept() -> None:
    def drawn(seed: int) -> LinformerAttention:
        return make(projection="gaussian", sharing="none", num_heads=2, seed=seed)

    mechanism, other = drawn(1), drawn(2)
    weight, second = mechanism.get_buffer("weight"), other.get_buffer("weight")
    assert not list(mechanism.parameters())
    assert weight.shape == (2, 2, RANK, LONGEST)  # E and F, for each head
    assert not torch.equal(weight[0], weight[1])
    assert not torch.equal(weight, second)
    other.redraw(1)
    assert torch.equal(weight, second)
    other.reset_parameters()
    assert torch.equal(second, drawn(2).get_buffer("weight"))
    assert drawn(1).half().get_buffer("weight").dtype == torch.float32
    with torch.device("meta"):
        made = drawn(1)
    made = made.to_empty(device="cpu")
    made.reset_parameters()
    assert torch.equal(made.get_buffer("weight"), weight)


def test_autocast_and_half_modules() -> None:
    inputs = make_inputs(make(), 40)
    for options in CONFIGURATIONS.values():
        mechanism = make(**{**options, "num_heads": 2})
        want = mechanism(*inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = mechanism(*inputs.to(torch.float32))
        assert_close(got, want, 0.03)
        low = mechanism.to(torch.bfloat16)(*inputs.to(torch.bfloat16))
        assert low.dtype == torch.bfloat16
        assert_close(low, want, 0.03)


def test_cost_is_linear_in_the_length() -> None:
    def cost(length: int) -> int:
        q = torch.randn(1, 4, length, 32, requires_grad=True)
        k = torch.randn(1, 2, length, 32, requires_grad=True)  # not repeated before they are projected
        mechanism = LinformerAttention(32, 16, max_length=4096)
        with FlopCounterMode(display=False) as counter:
            mechanism(q, k, k).sum().backward()
        return counter.get_total_flops()

    assert cost(4096) <= 4.01 * cost(1024)


# Theorem 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize("size", [0.5, 3.0], ids=["diffuse", "peaked"])
def test_johnson_lindenstrauss_error_is_what_theory_says(rank: int, size: float) -> None:
    """E |P E^T E v - P v|^2 = (|P|^2 |v|^2 + |P v|^2) / rank, for the matrices the mechanism draws."""
    n, draws = 60, 400
    q, k, v = make_inputs(SoftmaxAttention(D), n, batch=1)
    p = SoftmaxAttention(D).attention_matrix(size * q[:, :1], k[:, :1])[0, 0]
    v = v[0, 0]
    losses = torch.stack([(p @ e.mT @ (e @ v) - p @ v).square().sum() for e in gaussians(rank, n, draws)])
    expected = (p.square().sum() * v.square().sum() + (p @ v).square().sum()) / rank
    spread = losses.std() / draws**0.5
    assert abs(losses.mean() - expected) < 4 * spread


def gaussians(rank: int, n: int, draws: int) -> list[Tensor]:
    mechanism = LinformerAttention(D, rank, max_length=n, projection="gaussian", sharing="key_value")
    assert mechanism.weight is not None
    made = []
    for seed in range(draws):
        mechanism.redraw(seed)
        made.append(mechanism.weight[0, 0].double())
    return made


# Linformer times linear attention -------------------------------------------------------------------------------------


def test_linear_kernel_with_drawn_projections_estimates_linear_attention() -> None:
    """Unbiased, as E^T E = 1 on average and the normaliser is not projected."""
    mechanism = make(kernel="linear", projection="gaussian", sharing="key_value")
    inputs = make_inputs(mechanism, 50, batch=1)
    outputs = []
    for seed in range(400):
        mechanism.redraw(seed)
        outputs.append(mechanism(*inputs))
    every = torch.stack(outputs)
    error = every.mean(0) - LinearAttention(D)(*inputs)
    standard = every.std(0) / 400**0.5
    assert float((error / standard).square().mean()) < 1.5  # 1 if there is no bias


def test_linear_kernel_survives_row_sums_that_vanish() -> None:
    """Row sums of phi(q) (E phi(k))^T have both signs; dividing by them would tear outputs apart."""
    mechanism = make(kernel="linear")
    inputs = make_inputs(mechanism, 60)
    matrix = mechanism.attention_matrix(inputs.q, inputs.k)
    assert bool((matrix < 0).any())
    signs = matrix.sum(-1).sign()
    assert bool((signs > 0).any())
    assert bool((signs < 0).any())
    assert float(mechanism(*inputs).detach().abs().max()) < float(inputs.v.abs().max())


# Errors ---------------------------------------------------------------------------------------------------------------

x = torch.randn(2, 4, 5, D)
e = torch.randn(3, 8)
left = torch.tensor([[True] * 5, [False, True, True, True, True]])
holes = torch.tensor([[True, False, False, True, True], [True] * 5])


def cast(value: object) -> Any:
    """Something of the wrong type, past the type checker."""
    return value


def padding(sequence: int, token: int) -> str:
    return (
        "linformer: its projections are bound to positions, so key_mask may pad on the right only, but in sequence "
        f"{sequence} token {token} is real and the one before is masked; move the padding to the end"
    )


ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no length": (
        lambda: attention("linformer", head_dim=4),
        errors.ConfigError,
        "linformer: needs max_length, the longest sequence its projections are made for",
    ),
    "too long": (
        lambda: make(max_length=4)(x, x, x),
        errors.ShapeError,
        "linformer: made for at most max_length=4 keys, got 5; make it with a larger max_length, or cut the sequence",
    ),
    "matrix of too long": (
        lambda: make(max_length=4).attention_matrix(x, x),
        errors.ShapeError,
        "linformer: made for at most max_length=4 keys, got 5; make it with a larger max_length, or cut the sequence",
    ),
    "heads": (
        lambda: make(num_heads=3)(x, x, x),
        errors.ShapeError,
        "linformer: made for num_heads=3 heads of k, got 4",
    ),
    "left padding": (lambda: make()(x, x, x, key_mask=left), errors.MaskError, padding(1, 1)),
    "holes": (lambda: make().attention_matrix(x, x, key_mask=holes), errors.MaskError, padding(0, 3)),
    "function, left": (
        lambda: linformer_attention(x, x, x, e, e, key_mask=left),
        errors.MaskError,
        padding(1, 1),
    ),
    "causal": (
        lambda: make()(x, x, x, causal=True),
        errors.ConfigError,
        "linformer: cannot be causal, its projections mix the keys of all positions; use causal=False",
    ),
    "extend": (
        lambda: make().extend(x, x, x),
        errors.ConfigError,
        "linformer: cannot extend a sequence, it has no state; use forward on the whole",
    ),
    "projection": (
        lambda: make(projection="means"),
        errors.ConfigError,
        "linformer: projection must be one of learned, convolution, mean, gaussian, got 'means' (did you mean 'mean'?)",
    ),
    "sharing": (
        lambda: make(sharing="heads"),
        errors.ConfigError,
        "linformer: sharing must be one of none, headwise, key_value, layerwise, got 'heads' "
        "(did you mean 'headwise'?)",
    ),
    "kernel": (
        lambda: make(kernel="relu"),
        errors.ConfigError,
        "linformer: kernel must be one of softmax, linear, got 'relu'",
    ),
    "blocks": (
        lambda: make(rank=7, projection="mean"),
        errors.ConfigError,
        "linformer: projection='mean' has blocks of max_length / rank tokens, so max_length must be a multiple "
        "of rank, got 72 and 7",
    ),
    "sharing of nothing": (
        lambda: make(projection="mean", sharing="headwise"),
        errors.ConfigError,
        "linformer: projection='mean' has no matrices to share; leave sharing='headwise' out",
    ),
    "no heads": (
        lambda: make(sharing="none"),
        errors.ConfigError,
        "linformer: sharing='none' has projections for each head; give num_heads = the heads of k",
    ),
    "drawn for all layers": (
        lambda: make(projection="gaussian", sharing="layerwise"),
        errors.ConfigError,
        "linformer: sharing='layerwise' ties what layers learn, projection='gaussian' is drawn for each layer; "
        "use sharing='key_value'",
    ),
    "seed": (
        lambda: make(seed=1),
        errors.ConfigError,
        "linformer: seed draws projection='gaussian', got projection='learned'; leave it out",
    ),
    "scale": (
        lambda: make(kernel="linear", scale=0.5),
        errors.ConfigError,
        "linformer: kernel='linear' has no logits to scale; leave scale=0.5 out",
    ),
    "redraw": (
        lambda: make().redraw(1),
        errors.ConfigError,
        "linformer: nothing to redraw with projection='learned'; only 'gaussian' is drawn",
    ),
    "list for a matrix": (
        lambda: linformer_attention(x, x, x, cast([1.0]), e),
        errors.DtypeError,
        "linformer: e must be a floating-point tensor, got list",
    ),
    "whole numbers": (
        lambda: linformer_attention(x, x, x, e, e.int()),
        errors.DtypeError,
        "linformer: f must be a floating-point tensor, got int32",
    ),
    "stack of matrices": (
        lambda: linformer_attention(x, x, x, torch.randn(3, 3, 8), e),
        errors.ShapeError,
        "linformer: e must be [rank, max_length] or [1 or 4, rank, max_length], got [3, 3, 8]",
    ),
    "device": (
        lambda: linformer_attention(x, x, x, e.to("meta"), e),
        errors.BackendError,
        "linformer: e is on meta, k on cpu; move one of them",
    ),
    "short matrix": (
        lambda: linformer_attention(x, x, x, e, e[:, :4]),
        errors.ShapeError,
        "linformer: made for at most max_length=4 keys, got 5; make it with a larger max_length, or cut the sequence",
    ),
    "two ranks": (
        lambda: linformer_attention(x, x, x, e, e[:2]),
        errors.ShapeError,
        "linformer: e and f must have the same rank, got [3, 8] and [2, 8]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_word_for_word(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message


def test_modules_say_what_they_are() -> None:
    assert repr(make(scale=0.5)) == (
        "LinformerAttention(head_dim=6, rank=9, max_length=72, sharing='headwise', projection='learned', "
        "kernel='softmax', scale=0.5, num_heads=None)"
    )
    assert repr(make(projection="mean", kernel="linear")) == (
        "LinformerAttention(head_dim=6, rank=9, max_length=72, projection='mean', kernel='linear', num_heads=None)"
    )
