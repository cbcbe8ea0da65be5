"""Window attention: the contract, Longformer's layer, Transformer-XL's memory, and the engine under them."""

import pytest
import torch
from torch import Tensor

from subquad import Mechanism, WindowAttention, errors
from subquad.functional import window_attention
from subquad.kernels.sparse import torch as sparse
from subquad.kernels.sparse.operator import sparse_attention
from subquad.kernels.sparse.torch import ABSENT_KEY, Bounds, Pairs
from subquad.nn import LongformerSelfAttention
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract
from subquad.testing.inputs import gradients, make_mask

D = 6


@parametrize_contract(
    {
        "window": lambda: WindowAttention(D, 8),
        "window-narrow": lambda: WindowAttention(D, 2, scale=0.7),
        "window-wider-than-the-sequence": lambda: WindowAttention(D, 400),
        "window-dilated": lambda: WindowAttention(D, 6, dilation=3),
        "window-dilation-per-head": lambda: WindowAttention(D, 4, dilation=[1, 5]),
        "window-global": lambda: WindowAttention(D, 6, global_tokens=3),
        "window-dilated-global": lambda: WindowAttention(D, 4, dilation=[4, 2], global_tokens=1),
    }
)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


def test_small_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = WindowAttention(D, 40, dilation=2, global_tokens=2)
    inputs = make_inputs(attention, 300).leaves()
    want = attention(*inputs)
    monkeypatch.setattr(sparse, "PAIRS_AT_ONCE", 1)
    got = attention(*inputs)
    assert_close(got, want, 1e-12, "output")
    for g, w in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert_close(g, w, 1e-12, "gradient")


# Global tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", [None, "right", "left", "holes"])
@pytest.mark.parametrize("dilation", [1, [1, 3]], ids=["plain", "dilated"])
def test_any_tokens_can_be_global(dilation: int | list[int], kind: str | None, causal: bool) -> None:
    """Some, other ones in each sequence, or none at all in one of them."""
    attention = WindowAttention(D, 6, dilation=dilation)
    inputs = make_inputs(attention, 70, batch=3).leaves()
    chosen = torch.rand(3, 70, generator=torch.Generator().manual_seed(1)) < torch.tensor([[0.2], [0.05], [0.0]])
    mask = None if kind is None else make_mask(70, kind)
    want = attention.reference(*inputs, causal=causal, key_mask=mask, global_mask=chosen)
    got = attention(*inputs, causal=causal, key_mask=mask, global_mask=chosen)
    assert_close(got, want, 1e-10, "output")
    for name, g, w in zip("qkv", gradients(got, inputs), gradients(want, inputs), strict=True):
        assert_close(g, w, 1e-10, f"gradient of {name}")


def test_no_global_token_is_no_global_mask() -> None:
    attention = WindowAttention(D, 6)
    inputs = make_inputs(attention, 20)
    nobody = torch.zeros(2, 20, dtype=torch.bool)
    assert torch.equal(attention(*inputs, global_mask=nobody), attention(*inputs))


def hugging_face_layer(hidden: int, heads: int, window: int) -> torch.nn.Module:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention as Theirs

    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=hidden, num_attention_heads=heads, attention_window=[window], attention_probs_dropout_prob=0.0
    )
    layer = Theirs(config, layer_id=0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("some_global", [False, True], ids=["windows", "global"])
def test_equals_longformer_of_hugging_face(some_global: bool) -> None:
    """Same weights, padded batch, global tokens with projections of their own."""
    theirs, ours = hugging_face_layer(24, 3, 16), LongformerSelfAttention(24, 3, window=16).double()
    ours.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(2)
    x, direction = torch.randn(2, 2, 64, 24, dtype=torch.float64, generator=generator)
    real = torch.arange(64) < torch.tensor([[64], [41]])
    chosen = torch.zeros(2, 64, dtype=torch.bool)
    if some_global:
        chosen[:, 0] = chosen[0, 37] = chosen[1, 20] = True
    mask = torch.where(chosen, 10000.0, 0.0).masked_fill(~real, -10000.0).double()
    want = theirs(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=some_global,
    )[0]
    got = ours(x, key_mask=real, global_mask=chosen if some_global else None)
    assert_close(got[real], want[real], 1e-6, "output")  # theirs takes the softmax in float32
    if not some_global:
        return  # then their gradients are NaN, as padded rows may see nothing at all
    names, parameters = zip(*ours.named_parameters(), strict=True)
    of_ours, of_theirs = (
        torch.autograd.grad((out * direction)[real].sum(), weights, allow_unused=True, materialize_grads=True)
        for out, weights in ((got, parameters), (want, [theirs.get_parameter(name) for name in names]))
    )
    for name, g, w in zip(names, of_ours, of_theirs, strict=True):
        if name in ("key.bias", "key_global.bias"):  # moves all logits of a row alike: zero, and theirs is rounding
            assert float(g.norm()) < 1e-10
        else:
            assert_close(g, w, 1e-6, f"gradient of {name}")


# Decoding -------------------------------------------------------------------------------------------------------------


def test_a_state_is_the_memory_of_transformer_xl() -> None:
    """Segments after segments: each token sees the last `window` tokens, across borders, and gradients stop there."""
    attention = WindowAttention(D, 12)
    inputs = make_inputs(attention, 60).leaves()
    whole = attention(*inputs, causal=True)
    state, outs = None, []
    for start in range(0, 60, 20):
        memory = None if state is None else type(state)(*(t.detach() for t in state))
        out, state = attention.extend(*inputs.tokens(start, start + 20), memory)
        outs.append(out)
    assert_close(torch.cat(outs, 2), whole, 1e-10, "segments")
    of_last = torch.autograd.grad(outs[-1].sum(), inputs.k)[0]
    assert bool(of_last[:, :, 40:].any())
    assert not bool(of_last[:, :, :40].any()), "a detached memory lets no gradient through"


# The engine -----------------------------------------------------------------------------------------------------------


def some_pairs(rounds: int) -> tuple[tuple[Tensor, Tensor, Tensor], Pairs]:
    generator = torch.Generator().manual_seed(0)
    tiles, rows, blocks, places, met = 5, 4, 6, 3, 2
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((tiles, rows, 7), (blocks, places, 7), (blocks, places, 2))
    )

    def labels(*shape: int) -> Tensor:
        return torch.randint(0, 4, shape, dtype=torch.int32, generator=generator)

    k_place = labels(blocks, places)
    k_place[0, 0] = ABSENT_KEY
    codes = (labels(tiles, rows, rounds), labels(blocks, places, rounds)) if rounds else (None, None)
    # every block at most once in a tile, or none (the number after the last)
    chosen = torch.stack([torch.randperm(blocks + 1, generator=generator)[:met] for _ in range(tiles)])
    return (q, k, v), Pairs(chosen, labels(tiles, rows), k_place, *codes)


def dense(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
    """One pair at a time."""
    outs, sums = [], []
    for n in range(q.shape[0]):
        for c in range(q.shape[1]):
            logits, values = [], []
            for block in pairs.blocks[n].tolist():
                for e in range(k.shape[1] if block < k.shape[0] else 0):
                    apart = int(pairs.q_place[n, c]) - int(pairs.k_place[block, e])
                    counts = bounds.place_low <= apart <= bounds.place_high
                    counts &= not (bounds.skip_self and apart == 0)
                    if pairs.q_code is not None and pairs.k_code is not None:
                        between = pairs.q_code[n, c] - pairs.k_code[block, e]
                        meets = ((between >= bounds.code_low) & (between <= bounds.code_high)).tolist()
                        counts = counts and meets[bounds.round] and not any(meets[: bounds.round])
                    if counts:
                        logits.append(scale * q[n, c] @ k[block, e])
                        values.append(v[block, e])
            if not logits:
                outs.append(torch.zeros(v.shape[2], dtype=v.dtype))
                sums.append(torch.tensor(0.0, dtype=v.dtype))
                continue
            stacked = torch.stack(logits)
            outs.append(stacked.softmax(0) @ torch.stack(values))
            sums.append(stacked.logsumexp(0))
    return torch.stack(outs).view(*q.shape[:2], -1), torch.stack(sums).view(q.shape[:2])


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize(
    "bounds", [Bounds(), Bounds(place_low=0, place_high=2), Bounds(code_low=-1, code_high=1, skip_self=True)]
)
def test_engine_against_pairs_one_by_one(rounds: int, bounds: Bounds) -> None:
    tensors, pairs = some_pairs(rounds)
    bounds = bounds._replace(round=max(0, rounds - 1))
    got, want = sparse_attention(*tensors, pairs, bounds, 0.6), dense(*tensors, pairs, bounds, 0.6)
    log_normaliser = got[1].masked_fill(got[1] == -torch.inf, 0)
    assert_close(got[0], want[0], 1e-12, "output")
    assert_close(log_normaliser, want[1], 1e-12, "log-normaliser")
    direction = torch.randn(got[0].shape, dtype=torch.float64), torch.randn(log_normaliser.shape, dtype=torch.float64)
    for name, g, w in zip(
        "qkv",
        torch.autograd.grad((got[0], log_normaliser), tensors, direction),
        torch.autograd.grad(want, tensors, direction),
        strict=True,
    ):
        assert_close(g, w, 1e-12, f"gradient of {name}")


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(place_low=-1, place_high=2), Bounds(-3, 3, skip_self=True)])
def test_tiles_that_look_alike_are_tiles_with_equal_labels(bounds: Bounds) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 7, dtype=torch.float64, generator=generator) for shape in ((3, 4), (6, 3), (6, 3)))
    q_place, k_place = (torch.randint(0, 4, (n,), dtype=torch.int32, generator=generator) for n in (4, 6))
    alive = torch.ones(6, 3, dtype=torch.bool)
    alive[1, 2] = alive[4, 0] = False
    blocks = torch.arange(6).view(3, 2)  # each is met once, so that it can have labels of its own
    alike = Pairs(blocks, q_place, k_place, alive=alive)
    of_blocks = k_place.view(2, 3).repeat(3, 1).masked_fill(~alive, ABSENT_KEY)
    labelled = Pairs(blocks, q_place.expand(3, -1).contiguous(), of_blocks)
    got, want = (sparse_attention(q, k, v, pairs, bounds, 0.6) for pairs in (alike, labelled))
    for one, other in zip(got, want, strict=True):
        assert_close(one.masked_fill(one == -torch.inf, 0), other.masked_fill(other == -torch.inf, 0), 1e-12)


def test_engine_passes_opcheck() -> None:
    tensors, pairs = some_pairs(3)
    torch.library.opcheck(
        torch.ops.subquad.sparse_forward.default, (*tensors, *pairs, *Bounds(round=1), 0.5), raise_exception=True
    )


def test_modules_say_what_they_are() -> None:
    assert repr(WindowAttention(8, 4, dilation=3, global_tokens=2)) == (
        "WindowAttention(head_dim=8, window=4, dilation=3, global_tokens=2, scale=0.3536)"
    )
    assert repr(WindowAttention(4, 6, dilation=[1, 2], scale=0.25)) == (
        "WindowAttention(head_dim=4, window=6, dilation=[1, 2], global_tokens=0, scale=0.25)"
    )


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 7}, "window must be even"),
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"dilation": []}, "got an empty list"),
        ({"dilation": [1, 0]}, "dilation must be a whole number"),
        ({"dilation": [1, 2, 3]}, "dilation has 3 entries"),
        ({"global_mask": torch.zeros(2, 9)}, "global_mask must be a bool tensor"),
        ({"global_mask": torch.zeros(2, 8, dtype=torch.bool)}, "global_mask must be [batch, length] = [2, 9]"),
        ({"global_qkv": (torch.zeros(2, 2, 9, 4),) * 3}, "global_qkv is for tokens of global_mask"),
    ],
)
def test_errors(options: dict, words: str) -> None:
    """Of the function, and of the module, whose width and dilation are the constructor's."""
    of_call = {name: value for name, value in options.items() if name.startswith("global")}
    of_module = {"window": 8} | {name: value for name, value in options.items() if name not in of_call}
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    with pytest.raises(errors.SubquadError) as caught:
        window_attention(q, k, v, **options)
    assert words in str(caught.value)
    with pytest.raises(errors.SubquadError) as caught:
        WindowAttention(4, **of_module)(q, k, v, **of_call)
    assert words in str(caught.value)
