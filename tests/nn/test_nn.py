"""`subquad.nn` against torch's own layers, and reversible stacks against plain ones."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad import MECHANISMS, errors
from subquad.nn import Block, Context, MultiheadAttention, TransformerEncoderLayer, reversible, rotation, sinusoidal
from subquad.testing import assert_close
from tiny_models import NARROW, favor_and_softmax

E, H, B, T = 16, 4, 2, 9
x = torch.randn(B, T, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
padding = torch.arange(T) >= torch.tensor([[T], [5]])
upper = torch.ones(T, T, dtype=torch.bool).triu(1)
floats = torch.zeros(T, T, dtype=torch.float64).masked_fill(upper, -torch.inf)


def pair(**options) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(E, H, **options).double()
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    return theirs, MultiheadAttention.from_torch(theirs, "softmax")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masks", [{}, {"attn_mask": upper}, {"attn_mask": floats}, {"key_padding_mask": padding}])
def test_multihead_is_torchs(batch_first: bool, bias: bool, masks: dict[str, Tensor]) -> None:
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    inputs = x if batch_first else x.transpose(0, 1)
    wanted, weights = theirs(inputs, inputs, inputs, **masks)
    got, none = ours(inputs, inputs, inputs, **masks)
    assert none is None
    assert_close(got, wanted, 1e-12)
    assert_close(ours(inputs, inputs, inputs, need_weights=True, **masks)[1], weights, 1e-12)
    assert_close(
        ours(inputs, inputs, inputs, need_weights=True, average_attn_weights=False, **masks)[1].mean(1), weights, 1e-12
    )


def test_multihead_unbatched_and_cross() -> None:
    theirs, ours = pair()
    assert_close(ours(x[0], x[0], x[0])[0], theirs(x[0], x[0], x[0])[0], 1e-12)
    masked = {"key_padding_mask": padding[1]}
    assert_close(ours(x[1], x[1], x[1], **masked)[0], theirs(x[1], x[1], x[1], **masked)[0], 1e-12)
    theirs, ours = pair(kdim=6, vdim=7, batch_first=True)
    key, value = torch.randn(B, 5, 6).double(), torch.randn(B, 5, 7).double()
    assert_close(ours(x, key, value)[0], theirs(x, key, value)[0], 1e-12)


def test_a_padding_mask_of_floats_is_that_of_bools() -> None:
    theirs, ours = pair(batch_first=True)
    floats = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -torch.inf)
    got = ours(x, x, x, key_padding_mask=floats)[0]
    assert torch.equal(got, ours(x, x, x, key_padding_mask=padding)[0])
    assert_close(got, theirs(x, x, x, key_padding_mask=floats)[0], 1e-12)


def test_causal_flag_is_the_causal_mask() -> None:
    _, ours = pair(batch_first=True)
    assert torch.equal(ours(x, x, x, is_causal=True)[0], ours(x, x, x, attn_mask=upper)[0])
    assert torch.equal(ours(x, x, x, is_causal=True, attn_mask=floats)[0], ours(x, x, x, attn_mask=upper)[0])


def test_weights_of_torch_load_strictly_whatever_is_inside() -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    for mechanism in MECHANISMS:
        needed: dict[str, Any] = {"linformer": {"max_length": 32}, "mixed": favor_and_softmax(H)}
        options = needed.get(mechanism.name, {})
        ours = MultiheadAttention(E, H, batch_first=True, attention=mechanism.name, **options)
        features = {name: value.clone() for name, value in ours.mechanism.state_dict().items()}
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
        assert all(torch.equal(ours.mechanism.state_dict()[name], value) for name, value in features.items())
        again = MultiheadAttention(E, H, batch_first=True, attention=mechanism.name, **options)
        again.load_state_dict(ours.state_dict())
        assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_is_torchs(norm_first: bool, masked: bool) -> None:
    torch.manual_seed(2)
    theirs = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=norm_first, activation="gelu").double()
    ours = TransformerEncoderLayer(
        E, H, 32, batch_first=True, norm_first=norm_first, activation="gelu", attention="softmax"
    ).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.eval()
    ours.eval()
    real = ~padding if masked else torch.ones_like(padding)
    wanted = theirs(x, src_key_padding_mask=padding if masked else None)
    assert_close(ours(x, src_key_padding_mask=padding if masked else None)[real], wanted[real], 1e-12)
    causal = ours(x, src_mask=upper)
    assert_close(causal, theirs(x, src_mask=upper), 1e-12)
    assert torch.equal(ours(x, is_causal=True), causal)


def test_torchs_other_arguments() -> None:
    layer = MultiheadAttention(16, 2, device="cpu", dtype=torch.float64)
    assert layer.in_proj_weight.dtype == torch.float64
    made = TransformerEncoderLayer(16, 2, activation=torch.tanh, dtype=torch.float64)(x.transpose(0, 1))
    assert made.shape == (T, B, E)


def test_torchs_fused_path_does_not_bypass_the_mechanism() -> None:
    """nn.TransformerEncoderLayer would compute exact attention from our weights at inference."""
    layer: Any = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True).eval()
    exact = layer(x.float())
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, "linear")
    with torch.no_grad():
        at_inference = layer(x.float())
    assert_close(at_inference, layer.train()(x.float()), 1e-6)
    assert not torch.allclose(at_inference, exact, atol=1e-3)


def test_rotation_depends_on_differences_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8).double()
    places = torch.tensor([[0, 7, 1_000_000]])

    def logits(shift: int) -> Tensor:
        turn = rotation(places + shift, 8)
        return turn(q.expand(1, 1, 3, 8)) @ turn(k.expand(1, 1, 3, 8)).mT

    assert_close(logits(12_345), logits(0), 1e-6)  # cosines are float32
    assert_close(rotation(torch.tensor([[0]]), 8)(q), q, 1e-12)


def test_a_share_of_the_pairs_turns_those_of_the_highest_frequencies() -> None:
    x, places = torch.randn(1, 2, 5, 8).double(), torch.arange(5)[None]
    whole, half, none = (rotation(places, 8, share=share)(x) for share in (1.0, 0.5, 0.0))
    turned = torch.tensor([0, 1, 4, 5])  # pairs are i and i + 4
    assert torch.equal(half[..., turned], whole[..., turned])
    assert torch.equal(half[..., turned + 2], x[..., turned + 2])
    assert not torch.allclose(whole[..., turned + 2], x[..., turned + 2], atol=1e-3)
    assert torch.equal(none, x)


def test_sinusoids_are_the_papers() -> None:
    made = sinusoidal(torch.tensor([[0, 3]]), 4)[0]
    angles = torch.tensor([3.0, 3.0 * 10_000 ** (-0.5)])
    assert_close(made[1], torch.cat([angles.sin(), angles.cos()]), 1e-6)
    assert made[0].tolist() == [0, 0, 1, 1]


# Reversible -----------------------------------------------------------------------------------------------------------


def plain(x1: Tensor, x2: Tensor, blocks: Any, context: Context) -> tuple[Tensor, Tensor]:
    for block in blocks:
        x1 = x1 + block.attend(x2, context)
        x2 = x2 + block.transform(x1)
    return x1, x2


REVERSIBLE: dict[str, dict[str, Any]] = {
    **{m.name: {"attention": m.name, "options": NARROW.get(m.name, {})} for m in MECHANISMS if m.supports_causal},
    "mixed": {"attention": "mixed", "options": favor_and_softmax(H)},
    "favor-in-clusters": {"attention": "cluster", "options": {"num_clusters": 3, "inside": "favor", "num_features": 8}},
}


def stack(attention: str, dropout: float = 0.0, layers: int = 3) -> Any:
    torch.manual_seed(3)
    blocks = (Block(E, H, **REVERSIBLE[attention], dropout=dropout, layer=i) for i in range(layers))
    return nn.ModuleList(blocks).double()


def gradients(run, blocks: Any, context: Context) -> list[Any]:
    torch.manual_seed(4)
    inputs = [x.clone().requires_grad_(), (2 * x).requires_grad_()]
    out = run(*inputs, blocks, context)
    weight = torch.linspace(-1, 1, E, dtype=torch.float64)
    ((out[0] * weight).sum() + (out[1] * weight).square().sum()).backward()
    grads = [*(i.grad for i in inputs), *(p.grad for p in blocks.parameters())]
    for parameter in blocks.parameters():
        parameter.grad = None
    return [*(o.detach() for o in out), *grads]


@pytest.mark.parametrize("attention", REVERSIBLE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_reversible_gradients_are_the_plain_ones(attention: str, dropout: float) -> None:
    blocks = stack(attention, dropout)
    turn = rotation(torch.arange(T)[None], E // H)
    only_causal = not blocks[0].attention.mechanism.supports_bidirectional
    for context in (Context(True, rotation=turn), Context(only_causal, ~padding)):
        for got, wanted in zip(gradients(reversible, blocks, context), gradients(plain, blocks, context), strict=True):
            assert (got is None) == (wanted is None) or not wanted.any()
            if got is not None:
                assert_close(got, wanted, 1e-9)


def test_reversible_leaves_frozen_parameters_alone() -> None:
    blocks = stack("linear")
    blocks[1].requires_grad_(False)
    gradients(reversible, blocks, Context(True))
    reversible(x.clone().requires_grad_(), x, list(blocks), Context(True))[0].sum().backward()
    assert all(p.grad is None for p in blocks[1].parameters())
    assert all(p.grad is not None for p in blocks[0].attention.parameters())


def test_reversible_keeps_two_streams_whatever_the_depth() -> None:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        for layers in (2, 6):
            kept.clear()
            blocks = stack("favor", layers=layers)
            reversible(x.clone().requires_grad_(), x, list(blocks), Context(True))
            assert sum(kept) == 2 * x.numel()


def test_reversible_under_autocast() -> None:
    blocks = stack("favor").float()
    single = x.float()

    def grads(run) -> list[Any]:
        for parameter in blocks.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(single, single, list(blocks), Context(True))
        (out[0].float().square().sum() + out[1].float().sum()).backward()
        return [p.grad for p in blocks.parameters()]

    plain_grads = copy.deepcopy(grads(plain))
    for got, wanted in zip(grads(reversible), plain_grads, strict=True):
        assert_close(got, wanted, 3e-2)  # bfloat16 rounds to 2**-8


ERRORS = {
    "dropout": (
        lambda: MultiheadAttention(E, H, dropout=0.1),
        "MultiheadAttention: attention weights are never formed, so they cannot be dropped; use dropout=0, got 0.1",
    ),
    "bias_kv": (
        lambda: MultiheadAttention(E, H, add_bias_kv=True),
        "MultiheadAttention: add_bias_kv=True is not supported; leave it out",
    ),
    "attn_mask": (
        lambda: pair(batch_first=True)[1](x, x, x, attn_mask=torch.eye(T, dtype=torch.bool)),
        "MultiheadAttention: attn_mask may only be the causal mask [9, 9] (True or -inf above the diagonal), got "
        "another one of shape [9, 9]; sub-quadratic attention cannot apply it",
    ),
    "float padding": (
        lambda: pair(batch_first=True)[1](x, x, x, key_padding_mask=torch.full((B, T), 0.5)),
        "MultiheadAttention: key_padding_mask must be bool (True = padding) or hold 0 and -inf only, got float32",
    ),
    "cross attention of a positional mechanism": (
        lambda: MultiheadAttention(E, H, batch_first=True).double()(x, x.clone(), x.clone()),
        "MultiheadAttention: favor compares positions, so key must be query (self-attention); "
        "use near=0 for cross-attention",
    ),
    "shape": (
        lambda: pair(batch_first=True)[1](x[..., :3], x, x),
        "MultiheadAttention: query must be [batch, length, 16] or [length, 16], got [2, 9, 3]",
    ),
    "nested": (
        lambda: pair(batch_first=True)[1](torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged), x, x),
        "MultiheadAttention: query is a nested tensor; make the encoder with enable_nested_tensor=False",
    ),
    "width": (
        lambda: MultiheadAttention(10, 4),
        "attention layer: the hidden size must be a multiple of the heads, got 10 and 4",
    ),
    "key heads": (
        lambda: Block(16, 4, num_key_value_heads=3),
        "attention layer: num_heads must be a multiple of num_key_value_heads, got 4 and 3",
    ),
    "activation": (
        lambda: TransformerEncoderLayer(16, 4, activation="relo"),
        "TransformerEncoderLayer: activation must be one of gelu, relu, silu, got 'relo' (did you mean 'relu'?)",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message
