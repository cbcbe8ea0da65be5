"""Short convolutions: the definition, padding, pieces, and models that have them."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import errors, reorder_state, state_bytes
from subquad.kernels import convolution as convolution_kernel
from subquad.kernels.cpu import library
from subquad.kernels.cpu.convolution import convolution_plan, convolution_step_plan
from subquad.models import SubquadConfig
from subquad.nn import Context, LayerState, SelfAttention, ShortConvolution
from subquad.testing import assert_close
from tiny_models import make, random_ids

WIDTHS = (1, 2, 3, 4, 5)
DIRECTIONS = pytest.mark.parametrize("causal", [True, False])


def convolution(channels: int, width: int) -> ShortConvolution:
    made = ShortConvolution(channels, width).double()
    made.weight.data = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(width)).double()
    return made


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


def defined(layer: ShortConvolution, x: Tensor, causal: bool) -> Tensor:
    """Token by token: the taps, first that of the token itself, by their offsets."""
    width, length = layer.width, x.shape[1]
    first = -(width - 1) if causal else -(width // 2)
    order = sorted(range(first, first + width), key=lambda offset: (abs(offset), offset))
    rows = []
    for t in range(length):
        there = [(i, t + offset) for i, offset in enumerate(order) if 0 <= t + offset < length]
        rows.append(sum((8 * layer.weight[:, 0, i] * x[:, place] for i, place in there), x[:, t] * 0))
    return torch.stack(rows, 1)


@DIRECTIONS
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_it_is_its_definition(width: int, length: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_kernel, "TILE", 2 * 3 * 4)  # tiles of four tokens
    layer, x, weights = convolution(3, width), numbers(2, length, 3), numbers(2, length, 3).detach()
    found = [layer(x, causal=causal), defined(layer, x, causal)]
    assert_close(found[0], found[1], 1e-14)
    got, want = (torch.autograd.grad((out * weights).sum(), [x, layer.weight]) for out in found)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-13)


def test_a_bidirectional_one_looks_further_back_than_ahead() -> None:
    layer, x = convolution(1, 4), torch.zeros(1, 9, 1, dtype=torch.float64)
    x[0, 4] = 1
    assert layer(x, causal=False)[0, :, 0].nonzero()[:, 0].tolist() == [3, 4, 5, 6]
    assert layer(x, causal=True)[0, :, 0].nonzero()[:, 0].tolist() == [4, 5, 6, 7]


@DIRECTIONS
@pytest.mark.parametrize("length", [16_384, 1 << 20])
def test_long_sequences_in_float32(causal: bool, length: int) -> None:
    layer = convolution(2, 4).float()
    exact = convolution(2, 4)
    x, weights = numbers(1, length, 2).detach(), numbers(1, length, 2).detach().roll(1, 1)
    found = []
    for one, dtype in ((layer, torch.float32), (exact, torch.float64)):
        given = x.to(dtype).requires_grad_()
        out = one(given, causal=causal)
        found.append([out, *torch.autograd.grad((out * weights.to(dtype)).sum(), [given, one.weight])])
    for got, want in zip(*found, strict=True):
        assert_close(got.double(), want, 1e-5)


@DIRECTIONS
def test_padding_is_no_neighbour(causal: bool) -> None:
    layer, x = convolution(3, 4), numbers(1, 7, 3).detach()
    alone = layer(x, causal=causal)
    places = torch.tensor([1, 2, 4, 7, 8, 9, 11])
    padded = torch.full((2, 13, 3), torch.nan, dtype=torch.float64)
    padded[0, places], padded[1] = x[0], 1.0
    mask = torch.zeros(2, 13, dtype=torch.bool)
    mask[0, places] = True
    out = layer(padded, causal=causal, key_mask=mask)
    assert_close(out[0, places], alone[0], 1e-14)
    assert out[~mask].abs().max() == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6], [12], [2, 2, 2, 6]], ids=str)
def test_pieces_are_the_whole(width: int, pieces: list[int]) -> None:
    layer, x = convolution(3, width), numbers(2, 12, 3)
    whole, recent, outs = layer(x, causal=True), None, []
    for piece in x.split(pieces, 1):
        out, recent = layer.extend(piece, recent)
        outs.append(out)
    together = torch.cat(outs, 1)
    assert_close(together, whole, 1e-14)
    got, want = (torch.autograd.grad(out.square().sum(), [x, layer.weight]) for out in (together, whole))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [3, 3, 3]], ids=str)
def test_pieces_with_padding_are_the_whole(pieces: list[int]) -> None:
    layer, x = convolution(3, 4), numbers(3, 9, 3).detach()
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 9]).bool()
    whole, recent, outs = layer(x, causal=True, key_mask=mask), None, []
    for piece, real in zip(x.split(pieces, 1), mask.split(pieces, 1), strict=True):
        before = recent
        out, recent = layer.extend(piece, recent, key_mask=real)
        outs.append(out)
        if before is not None:  # a piece without a real token is not remembered
            silent = ~real.any(-1)
            assert torch.equal(recent[silent], before[silent])
    assert_close(torch.cat(outs, 1), whole, 1e-14)


def test_it_begins_as_the_identity() -> None:
    x = torch.randn(2, 9, 8)
    for causal in (True, False):
        assert torch.equal(ShortConvolution(8, 4)(x, causal=causal), x)
    plain, mixed = make(attention="favor"), make(attention="favor", short_conv=4)
    mixed.load_state_dict(plain.state_dict(), strict=False)
    ids = random_ids(2, 20)
    assert_close(mixed(ids).logits, plain(ids).logits, 1e-12)


def test_half_precision_is_added_up_in_full() -> None:
    """256 + 1 is 256 in bfloat16."""
    layer = ShortConvolution(1, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 1.0, -1.0]]]) / 8)
    out = layer.bfloat16()(torch.tensor([[[256.0], [1.0], [256.0]]]).bfloat16(), causal=True)
    assert out.flatten().tolist() == [256, 256, 1]
    with torch.no_grad():
        layer.weight[..., 1:] = torch.tensor([129 / 128 / 8, 0])
    past = torch.tensor([[[0.0], [255 / 256]]]).bfloat16()  # times 129 / 128 a little more than 1, or 1 if rounded
    out, _ = layer.extend(torch.tensor([[[256.0]]]).bfloat16(), past)
    assert out.item() == 258  # and not 256, as of 257


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_of_inputs_is_kept(dtype: torch.dtype) -> None:
    layer, x = convolution(3, 4), numbers(2, 40, 3).detach()
    out = layer.to(dtype)(x.to(dtype), causal=True)
    assert out.dtype == dtype
    assert_close(out.double(), convolution(3, 4)(x, causal=True), 8 * torch.finfo(dtype).eps)


# Layers ---------------------------------------------------------------------------------------------------------------


def test_queries_and_keys_are_convolved_and_values_are_not() -> None:
    layer = SelfAttention(8, 2, attention="softmax", short_conv=3, num_key_value_heads=1).double()
    x, context = numbers(1, 6, 8).detach(), Context(causal=True)
    assert layer.short_conv is not None
    assert layer.short_conv.weight.shape == (8 + 4, 1, 3)
    before = layer(x, context)
    for first, last in ((0, 8), (8, 12)):
        layer.short_conv.reset_parameters()
        layer.short_conv.weight.data[first:last, 0, 1] = 0.125
        assert (layer(x, context) - before).abs().max() > 1e-3
    seen: list[Tensor] = []
    layer.mechanism.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    layer(x, context)
    assert torch.equal(seen[2][0, 0], layer.v_proj(x)[0])


def test_convolutions_come_before_the_rotation() -> None:
    """A token at the other end of the sequence finds the same keys: the filter is the same at all positions."""
    model = make(stir=True, attention="softmax", short_conv=3)
    ids = random_ids(1, 12)
    moved = model(ids, position_ids=torch.arange(12)[None] + 1000).logits
    assert_close(moved, model(ids).logits, 1e-6)  # cosines of positions are float32


def test_reversible_layers_have_the_gradients_of_plain_ones() -> None:
    ids, found = random_ids(2, 12), []
    for training in (True, False):
        model = make(stir=True, attention="favor", short_conv=3, reversible=True).train(training)
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for name, p in model.named_parameters() if "short_conv" in name])
    assert all(grad.abs().max() > 0 for grad in found[0])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-9)


def test_shared_queries_and_keys_are_convolved_once() -> None:
    layer = SelfAttention(8, 2, attention="softmax", short_conv=3, shared_qk=True)
    assert layer.short_conv is not None
    assert layer.short_conv.weight.shape == (8, 1, 3)
    assert layer(torch.randn(1, 6, 8), Context(causal=True)).shape == (1, 6, 8)


def test_learned_sizes_are_the_root_mean_squares_of_queries_and_keys() -> None:
    layer = SelfAttention(8, 2, attention="softmax", qk_norm=True).double()
    assert layer.q_size is not None
    assert layer.k_size is not None
    layer.q_size.data = torch.tensor([2.0, 3.0]).double()[:, None, None]
    layer.k_size.data = torch.tensor([0.5, 0.7]).double()[:, None, None]
    seen: list[Tensor] = []
    layer.mechanism.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    layer(numbers(1, 6, 8).detach(), Context(causal=True))
    for x, sizes in ((seen[0], [2.0, 3.0]), (seen[1], [0.5, 0.7])):
        assert_close(x.square().mean(-1).sqrt()[0], torch.tensor(sizes).double()[:, None].expand(2, 6), 1e-6)


def test_models_saved_before_there_were_convolutions_have_none(tmp_path: Any) -> None:
    model, ids = make(attention="favor", short_conv=0), random_ids(1, 20)
    assert not any("short_conv" in name or "_size" in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("short_conv") == 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.config.short_conv == 0
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_files_say_the_width_even_if_it_is_the_default(tmp_path: Any) -> None:
    SubquadConfig().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["short_conv"] == 4
    assert SubquadConfig.from_pretrained(tmp_path).short_conv == 4


def test_saved_models_come_back(tmp_path: Any) -> None:
    model, ids = make(stir=True, attention="favor", short_conv=4, qk_norm=True), random_ids(1, 20)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SelfAttention(8, 2, short_conv=-1),
            "attention layer: short_conv must be a whole number of at least 0, got -1",
        ),
        (
            lambda: SelfAttention(8, 2, qk_norm=1),  # pyright: ignore[reportArgumentType]
            "attention layer: qk_norm must be True or False, got 1",
        ),
        (
            lambda: SelfAttention(8, 2, shared_qk=True, qk_norm=True),
            "attention layer: with shared_qk=True keys are normalised already; leave qk_norm out",
        ),
        (lambda: make(short_conv=2.5), "SubquadConfig: short_conv must be a whole number of at least 0, got 2.5"),
        (
            lambda: ShortConvolution(8, 4)(torch.randn(2, 8), causal=True),
            "short convolution: x must be [batch, length, 8], got [2, 8]",
        ),
        (
            lambda: ShortConvolution(8, 4)(torch.ones(1, 2, 8, dtype=torch.int64), causal=True),
            "short convolution: x must be one of float16, bfloat16, float32, float64, got int64",
        ),
        (
            lambda: ShortConvolution(8, 4)(torch.randn(1, 2, 8, device="meta"), causal=True),
            "short convolution: x must be on the device of the weights, got meta and cpu",
        ),
        (
            lambda: ShortConvolution(8, 4)(torch.randn(1, 2, 8), causal=True, key_mask=torch.ones(1, 3).bool()),
            "short convolution: key_mask must be [batch, keys] = [1, 2], got [1, 3]",
        ),
        (
            lambda: SelfAttention(8, 2, short_conv=4)(torch.randn(1, 2, 8), Context(True, torch.ones(1, 3).bool())),
            "short convolution: key_mask must be [batch, keys] = [1, 2], got [1, 3]",
        ),
        (
            lambda: ShortConvolution(8, 4).extend(torch.randn(1, 2, 7), None),
            "short convolution: x must be [batch, length, 8], got [1, 2, 7]",
        ),
        (
            lambda: ShortConvolution(8, 4).extend(torch.randn(1, 2, 8), torch.randn(1, 2, 8)),
            "short convolution: the state must hold the last inputs [1, 3, 8], got [1, 2, 8]",
        ),
        (
            lambda: ShortConvolution(8, 4).extend(torch.randn(1, 2, 8), torch.randn(1, 3, 8).to_sparse()),
            "short convolution: the state must be a dense tensor, got sparse_coo; use .to_dense() or padding",
        ),
        (
            lambda: torch.no_grad()(ShortConvolution(8, 4).extend)(
                torch.randn(1, 1, 8), torch.randn(1, 3, 8).to_sparse()
            ),
            "short convolution: the state must be a dense tensor, got sparse_coo; use .to_dense() or padding",
        ),
        (
            lambda: ShortConvolution(8, 4).extend(torch.randn(1, 2, 8), torch.randn(1, 3, 8).double()),
            "short convolution: the state holds float64, but the new tokens are float32; cast one of them",
        ),
        (
            lambda: ShortConvolution(8, 4).extend(torch.randn(1, 2, 8), torch.randn(1, 3, 8, device="meta")),
            "short convolution: the state is on meta, the new tokens on cpu",
        ),
        (
            lambda: SelfAttention(8, 2, short_conv=4).extend(
                torch.randn(1, 2, 8), Context(True), (torch.randn(1, 3, 8),)
            ),
            "attention layer: state must be the LayerState that extend returned, or None to begin, got tuple; "
            "a layer without short convolutions has another state",
        ),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message


def test_a_layer_state_is_reordered_whole() -> None:
    layer, x = SelfAttention(8, 2, attention="linear", short_conv=3).double(), numbers(3, 5, 8).detach()
    _, state = layer.extend(x, Context(True), None)
    assert isinstance(state, LayerState)
    order = torch.tensor([2, 0])
    _, other = layer.extend(x[order], Context(True), None)
    assert isinstance(other, LayerState)
    picked = reorder_state(state, order)
    assert torch.equal(picked.recent, other.recent)
    for a, b in zip(picked.attention, other.attention, strict=True):
        assert_close(a.double(), b.double(), 1e-12)
    assert state_bytes(picked) == picked.recent.nbytes + state_bytes(picked.attention)


# The C++ engine and torch ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch", "cpu"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that convolves."""
    if request.param == "cpu" and not library.AVAILABLE:
        pytest.skip(library.WHY_MISSING)
    if request.param == "torch":
        monkeypatch.setattr(library, "AVAILABLE", False)
    return request.param


@DIRECTIONS
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 513, 33), (1, 1300, 64)], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4])
def test_both_engines_are_the_definition(width: int, shape: tuple[int, ...], causal: bool, engine: str) -> None:
    layer = convolution(shape[2], width)
    x, weights = numbers(*shape), numbers(*shape).detach().roll(1, 1)
    want = [layer(x, causal=causal)]
    want += torch.autograd.grad((want[0] * weights).sum(), [x, layer.weight])
    layer = layer.float()
    given = x.detach().float().requires_grad_()
    out = layer(given, causal=causal)
    got = [out, *torch.autograd.grad((out * weights.float()).sum(), [given, layer.weight])]
    for a, b in zip(got, want, strict=True):
        assert a.dtype is torch.float32
        assert_close(a.double(), b, 1e-5)


@pytest.mark.parametrize("wants", ["x", "weight"])
def test_gradients_of_one_alone(wants: str, engine: str) -> None:
    layer, x = convolution(3, 4).float(), numbers(2, 700, 3).detach().float().requires_grad_()
    both = torch.autograd.grad(layer(x, causal=True).square().sum(), [x, layer.weight])
    x.requires_grad_(wants == "x")
    layer.weight.requires_grad_(wants == "weight")
    (alone,) = torch.autograd.grad(layer(x, causal=True).square().sum(), [x if wants == "x" else layer.weight])
    assert torch.equal(alone, both[wants == "weight"])


def test_strided_inputs_and_gradients(engine: str) -> None:
    layer, found = convolution(3, 4).float(), []
    for strided in (False, True):
        x = numbers(3, 50, 2).detach().float().transpose(0, 2)  # [2, 50, 3], the channels farthest apart
        x = (x if strided else x.contiguous()).requires_grad_()
        out = layer(x, causal=True)
        found.append([out, *torch.autograd.grad(out.sum(), [x, layer.weight])])  # the gradient of a sum is one number
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-6)


def test_threads_change_no_bit() -> None:
    layer, x, found = convolution(40, 4).float(), numbers(2, 3000, 40).detach().float().requires_grad_(), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = layer(x, causal=False)
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, layer.weight])])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif(not library.AVAILABLE, reason="there is no C++ engine")
def test_the_gate_lets_nothing_else_through() -> None:
    plan, x, taps = convolution_plan(2, 5, 3, 4, True), torch.zeros(2, 5, 3), torch.zeros(4, 3)
    wrong = {
        "dtype": {"x": x.double()},
        "shape": {"x": x[:, :4]},
        "strides": {"x": torch.zeros(2, 3, 5).mT},
        "taps": {"taps": taps.T.contiguous()},
        "nothing to read": {"x": None},
        "no gradient": {"dtaps": torch.zeros(2, 4, 3)},
        "a gradient of another shape": {"grad": torch.zeros(2, 5, 4)},
    }
    for what, tensors in wrong.items():
        with pytest.raises(errors.SubquadError):
            pytest.fail(f"{what}: {plan.problem(1, **{'x': x, 'taps': taps, **tensors})}")
    for numbers_ in ((0, 5, 3, 4), (2, 0, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0), (2, 2**41, 3, 4)):
        with pytest.raises(errors.SubquadError):
            convolution_plan(*numbers_, True)


@pytest.mark.skipif(not library.AVAILABLE, reason="there is no C++ engine")
def test_the_gate_lets_nothing_else_through_to_a_step() -> None:
    plan = convolution_step_plan(2, (3, 5), 4, 8.0)
    right = [torch.zeros(8, 1, 4), torch.zeros(2, 3, 8), torch.zeros(2, 1, 3), torch.zeros(2, 1, 5)]
    plan.problem(right[0], right[1], right[2:])
    for place, tensor in enumerate(right):
        for odd in (tensor.double(), tensor[:1], tensor[None], torch.stack([tensor, tensor], -1)[..., 0], None):
            weight, recent, *parts = [*right[:place], odd, *right[place + 1 :]]
            with pytest.raises(errors.SubquadError, match="cpu engine: "):
                plan.problem(weight, recent, parts)  # pyright: ignore[reportArgumentType]
    for wrong in ((0, (3,), 4, 8.0), (2, (0,), 4, 8.0), (2, (3, 0), 4, 8.0), (2, (3,), 0, 8.0), (2, (3,), 4, 0.0)):
        with pytest.raises(errors.SubquadError):
            convolution_step_plan(*wrong)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("channels", [(5,), (16, 9)], ids=str)
def test_token_by_token_in_float32(channels: tuple[int, ...], width: int, batch: int, engine: str) -> None:
    """What is kept is the inputs, and in C++ the outputs are those of the whole, to the bit."""
    layer = convolution(sum(channels), width).float()
    x, recent, outs = numbers(batch, 9, sum(channels)).detach().float(), None, []
    with torch.no_grad():
        whole = layer(x, causal=True)
        for t in range(9):
            before = None if recent is None else recent.clone()
            parts = [part.contiguous() for part in x[:, t : t + 1].split(channels, -1)]
            out, new = layer.extend_parts(parts, recent)
            assert before is None or recent is None or torch.equal(recent, before)
            recent = new
            outs.append(torch.cat(out, -1))
            seen = torch.cat([torch.zeros(batch, width - 1, sum(channels)), x[:, : t + 1]], 1)
            assert torch.equal(recent, seen[:, seen.shape[1] - width + 1 :])
    assert_close(torch.cat(outs, 1), whole, 1e-6)
    if engine == "cpu" and width > 1:
        assert torch.equal(torch.cat(outs, 1)[:, 1:], whole[:, 1:])  # the first has no past yet


@pytest.mark.skipif(not library.AVAILABLE, reason="there is no C++ engine")
def test_what_takes_the_engines_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, taken = convolution(4, 3).float(), []
    call = convolution_kernel.call.engine()
    monkeypatch.setattr(library, "LOADED", call._replace(convolve_step=lambda *_: taken.append(1)))
    x, recent = torch.randn(2, 1, 4), torch.randn(2, 2, 4)
    with torch.no_grad():
        layer.extend(x, recent.transpose(0, 1).contiguous().transpose(0, 1))
        assert len(taken) == 1
        layer.extend(x, recent, key_mask=torch.ones(2, 1, dtype=torch.bool))
        layer.extend(torch.randn(2, 2, 4), recent)
        layer.bfloat16().extend(x.bfloat16(), recent.bfloat16())
    layer.float().extend(x, recent)[0].sum().backward()
    assert len(taken) == 1


def test_nothing_to_convolve() -> None:
    layer = convolution(3, 4).float()
    assert layer(torch.zeros(0, 5, 3), causal=True).shape == (0, 5, 3)
    assert layer(torch.zeros(2, 0, 3), causal=True).shape == (2, 0, 3)
