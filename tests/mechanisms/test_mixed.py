"""Mixed attention: the contract, heads that reach their parts and come back, states, facts, and wrong parts."""

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from fitted import fitted
from subquad import FavorAttention, Mechanism, MixedAttention, errors
from subquad.mechanism import outermost
from subquad.mechanisms.mixed_heads import Partition
from subquad.nn import SelfAttention, layer_mechanism
from subquad.testing import Check, assert_close, make_inputs, parametrize_contract
from subquad.testing.inputs import VALUE_DIM, gradients, make_mask

D = 6
FAVOR = {"attention": "favor", "num_features": 16, "near": 8, "sinks": 2, "backend": "torch"}
PAPER = {**FAVOR, "near": 0, "sinks": 0}
LINFORMER = {"attention": "linformer", "rank": 5, "max_length": 80}


def part(like: str | dict[str, Any], *heads: int, **options: Any) -> dict[str, Any]:
    made = {"attention": like} if isinstance(like, str) else like
    return {**made, "heads": list(heads), **options}


def mixed(*parts: dict[str, Any]) -> MixedAttention:
    return MixedAttention(D, parts)


def learned() -> MixedAttention:
    """With a part that learns its features, a map for each of its heads."""
    made = mixed(part(FAVOR, 0, 1, num_heads=2), part("softmax", 2))
    features = fitted(FavorAttention, D, 16, estimator="hedgehog", near=8, sinks=2, num_heads=2, backend="torch")
    made.parts["favor0"].adopt_features(features)  # pyright: ignore[reportCallIssue]
    return made


CASES: dict[str, Callable[[], MixedAttention]] = {
    "favor-and-softmax": lambda: mixed(part(FAVOR, 0), part("softmax", 1)),
    "scattered": lambda: mixed(part(FAVOR, 3, 0, num_heads=2), part("softmax", 1), part("linear", 2)),
    "not-positional": lambda: mixed(part(PAPER, 1), part("linear", 0)),
    "many": lambda: mixed(part("window", 0, 2, window=4, dilation=[1, 3]), part(FAVOR, 1), part("softmax", 3, 4)),
    "constant-state": lambda: mixed(part(FAVOR, 0, 2), part("window", 1, window=6, global_tokens=2)),
    "not-causal": lambda: mixed(part("softmax", 1), part({**LINFORMER, "num_heads": 2, "sharing": "none"}, 0, 2)),
    "not-causal-positional": lambda: mixed(part("window", 0, window=4), part(LINFORMER, 1)),
    "identity-and-strided": lambda: mixed(part("identity", 1), part("strided", 0, 2, stride=5)),
    "buckets": lambda: mixed(part("lsh", 0, num_buckets=4, bucket_size=3, rounds=2), part("linear", 1)),
    "alone": lambda: mixed(part("softmax", 0, 1, scale=0.7)),
    "learned": learned,
}


@parametrize_contract(CASES)
def test_contract(mechanism: Mechanism, check: Check) -> None:
    check(mechanism)


# Heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", [None, "left", "holes"])
def test_every_head_is_that_of_its_mechanism_alone(kind: str | None, causal: bool) -> None:
    """Head by head, by hand; three query heads for each key head."""
    parts = (part(PAPER, 4, 1), part("softmax", 0, 3, scale=0.4), part("window", 2, window=4))
    attention, mask = mixed(*parts), None if kind is None else make_mask(30, kind)
    shapes = ((3, 15, 30, D), (3, 5, 30, D), (3, 5, 30, 4))
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(3)).double() for shape in shapes)
    out = attention(q, k, v, causal=causal, key_mask=mask)
    matrix = attention.attention_matrix(q, k, causal=causal, key_mask=mask)
    for given, made in zip(parts, attention.mechanisms(), strict=True):
        for head in given["heads"]:
            own, queries = slice(head, head + 1), slice(3 * head, 3 * head + 3)
            want = made(q[:, queries], k[:, own], v[:, own], causal=causal, key_mask=mask)
            weights = made.attention_matrix(q[:, queries], k[:, own], causal=causal, key_mask=mask)
            if mask is not None:
                want, weights = (x.masked_fill(~mask[:, None, :, None], 0) for x in (want, weights))
            assert_close(out[:, queries], want, 1e-12, f"head {head}")
            assert_close(matrix[:, queries], weights, 1e-12, f"weights of head {head}")


def test_options_of_heads_go_by_the_order_of_the_part() -> None:
    """Head 2 has the first dilation, head 0 the second."""
    inputs = make_inputs(CASES["many"](), 40)
    q, k, v = inputs.q[:, :6], inputs.k[:, :3], inputs.v[:, :3]
    got = mixed(part("window", 2, 0, window=4, dilation=[1, 3]), part("softmax", 1))(q, k, v)
    for head, dilation in ((2, 1), (0, 3)):
        alone = subquad.WindowAttention(D, 4, dilation=dilation)
        queries, keys = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        assert_close(got[:, queries], alone(q[:, queries], k[:, keys], v[:, keys]), 1e-12)


def test_dense_weights_are_those_of_the_parts() -> None:
    attention = mixed(part(FAVOR, 0, 2), part("softmax", 1))
    q, k, _ = make_inputs(attention, 20)
    k = k.repeat_interleave(2, 1)
    index, seen = torch.arange(20)[None], torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    got = attention.dense_weights(q, k, seen, index, index)
    assert_close(got, attention.attention_matrix(q, k[:, ::2], causal=True), 1e-12)


@pytest.mark.parametrize(
    ("heads", "copies"),
    [([[0, 1, 2]], 0), ([[0, 1], [2]], 0), ([[2], [0, 1]], 0), ([[0, 2], [1]], 1), ([[2, 1, 0]], 1)],
    ids=str,
)
def test_heads_side_by_side_are_views(heads: list[list[int]], copies: int) -> None:
    """And a part with all heads is the tensor itself, on the way in and out."""
    partition, x = Partition(heads), torch.randn(2, 6, 5, D)
    parts = partition.split(x)
    assert sum(p.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for p in parts) == copies
    assert torch.equal(partition.join(parts), x)
    for own, got in zip(heads, parts, strict=True):
        assert torch.equal(got, torch.cat([x[:, 2 * head : 2 * head + 2] for head in own], 1))
    if heads == [[0, 1, 2]]:
        assert parts[0] is x
        assert partition.join(parts) is x


def test_parts_are_called_as_modules() -> None:
    """Hooks of the parts run, also those that torch and other libraries register."""
    attention, seen = CASES["scattered"](), []
    for made in attention.mechanisms():
        made.register_forward_hook(lambda module, given, _: seen.append((module.name, given[1].shape[1])))
    attention(*make_inputs(attention, 9))
    assert seen == [("favor", 2), ("softmax", 1), ("linear", 1)]


# Facts ----------------------------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_parts() -> None:
    one, two = CASES["favor-and-softmax"](), CASES["not-causal"]()
    assert (one.supports_causal, one.supports_state, one.state_grows, one.positional) == (True, True, True, True)
    assert (two.supports_causal, two.supports_state, two.positional, two.convex) == (False, False, False, False)
    assert (one.mask_kinds, two.mask_kinds) == (("right", "left", "holes"), ("right",))
    assert (one.float32_floor, mixed(part(FAVOR, 0)).float32_floor) == (1e-5, 2**-23)
    assert (mixed(part(FAVOR, 0)).of_inner_products, CASES["not-positional"]().of_inner_products) == (True, False)
    assert not CASES["constant-state"]().state_grows
    assert not CASES["not-positional"]().positional
    assert one.convex
    assert one.key_heads == 2
    assert MixedAttention.supports_causal  # of the class: some of its modules are


def test_features_that_are_taken_over_count() -> None:
    attention = mixed(part(PAPER, 0))
    assert attention.convex
    signed = FavorAttention(D, 16, near=0, sinks=0, estimator="trigonometric")
    attention.parts["favor0"].adopt_features(signed)  # pyright: ignore[reportCallIssue]
    assert not attention.convex


def test_it_says_what_it_is() -> None:
    lines = repr(CASES["favor-and-softmax"]()).splitlines()
    assert lines[1] == "  head_dim=6, favor0 on [0], softmax1 on [1]"
    assert lines[3].startswith("    (favor0): FavorAttention(head_dim=6, num_features=16, near=8, ")


def test_parts_of_a_mechanism_are_no_mechanisms_of_the_model() -> None:
    model = torch.nn.ModuleList([CASES["scattered"](), subquad.SoftmaxAttention(D), CASES["many"]()])
    assert [name for name, _ in outermost(model)] == ["0", "1", "2"]
    assert [name for name, _ in outermost(model, subquad.SoftmaxAttention)] == [
        "0.parts.softmax1",
        "1",
        "2.parts.softmax2",
    ]
    assert outermost(model[0]) == [("", model[0])]


# States ---------------------------------------------------------------------------------------------------------------


def state_of(attention: Mechanism, length: int = 9) -> Any:
    return attention.extend(*make_inputs(attention, length))[1]


def test_a_state_is_flat_and_its_class_is_made_once() -> None:
    attention = CASES["favor-and-softmax"]()
    state = state_of(attention)
    assert state._fields[0] == "favor0_length"
    assert state._fields[-3:] == ("softmax1_k", "softmax1_v", "softmax1_mask")
    assert state.softmax1_k.shape == (2, 1, 9, D)
    assert all(isinstance(tensor, Tensor) for tensor in state)
    assert type(state) is type(state_of(CASES["favor-and-softmax"](), 4))
    assert type(state) is not type(state_of(mixed(part(FAVOR, 1), part("softmax", 0))))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_goes_on(copied: Callable[[Any], Any]) -> None:
    attention = CASES["favor-and-softmax"]()
    inputs, state = make_inputs(attention, 9), state_of(attention)
    again = copied(state)
    assert type(again) is type(state)
    assert torch.equal(attention.extend(*inputs, again)[0], attention.extend(*inputs, state)[0])


def test_rows_of_masked_tokens_are_zero_while_decoding_too() -> None:
    """Also those of parts that would compute them like any row."""
    attention = mixed(part(FAVOR, 0), part("linear", 1))
    inputs, mask = make_inputs(attention, 9, batch=3), make_mask(9, "right")
    out, state = attention.extend(*inputs, key_mask=mask)
    assert not bool(out[1, :, -1].any())
    out, _ = attention.extend(*inputs.tokens(0, 1), state, key_mask=mask[:, -1:])
    assert bool(out[0].any())
    assert not bool(out[1:].any())
    apart = CASES["not-positional"]()
    assert bool(apart.extend(*inputs, key_mask=mask)[0][1, :, -1].any())


@pytest.mark.full
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled() -> None:
    attention = CASES["scattered"]()
    compiled, step = torch.compile(attention, fullgraph=True), torch.compile(attention.extend)
    for length in (9, 17, 33):  # the second length makes it dynamic
        inputs = make_inputs(attention, length).leaves()
        got, want = compiled(*inputs, causal=True), attention(*inputs, causal=True)
        assert_close(got, want, 1e-12, f"length {length}")
        for g, w in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
            assert_close(g, w, 1e-12, f"gradient, length {length}")
    inputs = make_inputs(attention, 33)
    want, (_, state) = attention(*inputs, causal=True), attention.extend(*inputs.tokens(0, 29))
    for t in range(29, 33):
        out, state = step(*inputs.tokens(t, t + 1), state)
        assert_close(out, want[:, :, t : t + 1], 1e-12, f"token {t}")


# In a layer -----------------------------------------------------------------------------------------------------------


def test_a_layer_gives_each_key_head_and_each_part_a_draw_of_its_own() -> None:
    parts = [part(FAVOR, 0, 2), part(FAVOR, 3), part("softmax", 1), part("linear", 4)]
    made: list[Any] = [layer_mechanism("mixed", {"parts": parts}, head_dim=D, key_heads=5, layer=n) for n in (0, 1)]
    drawn = [rows for each in made for name in ("favor0", "favor1") for rows in each.parts[name].weight]
    assert len(drawn) == 6
    assert len({tuple(rows.flatten().tolist()) for rows in drawn}) == 6
    again: Any = layer_mechanism("mixed", {"parts": parts}, head_dim=D, key_heads=5, layer=1)
    assert torch.equal(again.parts["favor1"].weight, made[1].parts["favor1"].weight)
    assert parts[0] == part(FAVOR, 0, 2)  # what was given stays as it was


def test_parts_are_told_of_the_layer() -> None:
    parts = [part("softmax", 1), part("linformer", 0, 2, rank=4, sharing="none")]
    made: Any = layer_mechanism("mixed", {"parts": parts}, head_dim=D, key_heads=3, max_length=50)
    assert (made.parts["linformer1"].num_heads, made.parts["linformer1"].max_length) == (2, 50)
    assert made.parts["linformer1"].e.shape == (2, 4, 50)


def test_parts_survive_json() -> None:
    """In the order in which they are given, and with the order of their heads."""
    parts = [part(FAVOR, 3, 0), part("softmax", 1, 2)]
    made = subquad.attention("mixed", head_dim=D, parts=json.loads(json.dumps(parts)))
    inputs = make_inputs(made, 30)
    assert torch.equal(made(*inputs), mixed(*parts)(*inputs))
    assert list(made.state_dict()) == list(mixed(*parts).state_dict())


# Mistakes -------------------------------------------------------------------------------------------------------------

EXAMPLE = "[{'attention': 'favor', 'heads': [0, 2], 'num_features': 64}, {'attention': 'softmax', 'heads': [1]}]"
KNOWN = ", ".join(kind.name for kind in subquad.MECHANISMS if kind is not MixedAttention)
LIST = f"mixed: parts must be a list with a dict for each part, such as {EXAMPLE}, got "
TOGETHER = "mixed: all parts together must have the key heads 0, 1, ..., each once; "
HEADS = "mixed: part 0 (softmax) must have a list of key heads, whole numbers from 0 on, got heads="


def given(*parts: Any) -> Callable[[], Any]:
    return lambda: MixedAttention(D, parts)


def called(heads: int, **options: Any) -> Callable[[], Any]:
    x = torch.randn(1, heads, 9, D)
    return lambda: CASES["favor-and-softmax"]()(x, x, x, **options)


def continued(state: Any) -> Callable[[], Any]:
    x = torch.randn(2, 2, 1, D, dtype=torch.float64)
    return lambda: CASES["favor-and-softmax"]().extend(x, x, x[..., :VALUE_DIM], state)


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no parts": (
        lambda: subquad.attention("mixed", head_dim=8),
        f"mixed: needs parts, which say what each key head has, such as parts={EXAMPLE}; "
        "on the command line --option 'parts=...', in JSON",
    ),
    "no parts in a layer": (
        lambda: SelfAttention(16, 2, attention="mixed"),
        f"mixed: needs parts, which say what each key head has, such as parts={EXAMPLE}; "
        "on the command line --option 'parts=...', in JSON",
    ),
    "a dict": (lambda: MixedAttention(D, part("softmax", 0)), LIST + "{'attention': 'softmax', 'heads': [0]}"),  # pyright: ignore
    "a list of names": (lambda: MixedAttention(D, ["softmax"]), LIST + "['softmax']"),  # pyright: ignore
    "an empty list": (lambda: MixedAttention(D, []), LIST + "[]"),
    "a name": (lambda: MixedAttention(D, "softmax"), LIST + "'softmax'"),  # pyright: ignore
    "no mechanism": (
        given({"heads": [0]}),
        f"mixed: part 0 has no 'attention', the name of its mechanism; known: {KNOWN}",
    ),
    "an unknown mechanism": (
        given(part("softmax", 0), part("favour", 1)),
        f"mixed: part 1 has the unknown attention 'favour' (did you mean 'favor'?); known: {KNOWN}",
    ),
    "mixed in mixed": (
        given(part("softmax", 0), {"attention": "mixed", "heads": [1], "parts": [part("softmax", 0)]}),
        "mixed: part 1 is mixed itself; put its parts beside the others",
    ),
    "no heads": (given({"attention": "softmax"}), "mixed: part 0 (softmax) has no 'heads', the list of its key heads"),
    "an empty list of heads": (given(part("softmax")), HEADS + "[]"),
    "one head": (given({"attention": "softmax", "heads": 0}), HEADS + "0"),
    "a negative head": (given(part("softmax", -1)), HEADS + "[-1]"),
    "a true head": (given({"attention": "softmax", "heads": [False, True]}), HEADS + "[False, True]"),
    "half a head": (given({"attention": "softmax", "heads": [0.5]}), HEADS + "[0.5]"),
    "a head twice": (given(part("softmax", 0, 1), part("linear", 1, 2)), TOGETHER + "head 1 is there twice"),
    "a head twice in one part": (given(part("softmax", 0, 0)), TOGETHER + "head 0 is there twice"),
    "a head missing": (given(part("softmax", 0), part("linear", 2)), TOGETHER + "head 1 is missing"),
    "an unknown option": (
        given(part("linear", 0), part("favor", 1, num_feature=8)),
        "mixed: part 1 (favor): unknown option 'num_feature' (did you mean 'num_features'?); options: num_features, "
        "near, reach, sinks, far, estimator, coupling, kernel, scale, num_heads, transform, seed, backend, chunk",
    ),
    "a head dim of its own": (
        given(part("identity", 0, head_dim=4)),
        "mixed: part 0 (identity): unknown option 'head_dim'; options: ",
    ),
    "a wrong option": (
        given(part("window", 0, window=3)),
        "window: window must be even, half of it on each side of a token, got 3",
    ),
    "an unknown option of all": (
        lambda: subquad.attention("mixed", head_dim=8, part=[]),
        "mixed: unknown option 'part' (did you mean 'parts'?); options: parts",
    ),
    "a layer of other heads": (
        lambda: SelfAttention(16, 4, attention="mixed", options={"parts": [part("softmax", 0, 1)]}),
        "mixed: its parts have 2 key heads, the layer has 4; each must be in one part",
    ),
    "a call with other heads": (called(3), "mixed: made for 2 key heads, got k with 3"),
    "a causal call": (
        lambda: CASES["not-causal"]()(*make_inputs(CASES["not-causal"](), 9), causal=True),
        "mixed: cannot be causal, its projections mix the keys of all positions (linformer1 on [0, 2]); "
        "use causal=False",
    ),
    "a state where there is none": (
        lambda: state_of(CASES["not-causal"]()),
        "mixed: cannot extend a sequence, it has no state; use forward on the whole",
    ),
    "padding that one part cannot have": (
        lambda: CASES["not-causal"]()(*make_inputs(CASES["not-causal"](), 9, batch=3), key_mask=make_mask(9, "left")),
        "mixed: its projections are bound to positions, so key_mask may pad on the right only, but in sequence 1 "
        "token 5 is real and the one before is masked; move the padding to the end",
    ),
    "other keys": (
        lambda: CASES["favor-and-softmax"]()(*make_inputs(CASES["favor-and-softmax"](), 9, keys=12)),
        "mixed: compares positions, so it needs as many queries as keys, got 9 and 12; "
        "use near=0 for cross-attention (favor0 on [0])",
    ),
    "other keys, which no option allows": (
        lambda: CASES["many"]()(*make_inputs(CASES["many"](), 9, keys=12)),
        "mixed: compares positions, so it needs as many queries as keys, got 9 and 12",
    ),
    "the state of another mechanism": (
        continued(state_of(subquad.SoftmaxAttention(D))),
        "mixed: state must be one that extend returned for favor0 on [0] and softmax1 on [1], got SoftmaxState",
    ),
    "the state of other heads": (
        continued(state_of(mixed(part(FAVOR, 1), part("softmax", 0)))),
        "mixed: state must be one that extend returned for favor0 on [0] and softmax1 on [1], "
        "got a MixedState of favor0 on [1] and softmax1 on [0]",
    ),
    "no state at all": (
        continued(0),
        "mixed: state must be one that extend returned for favor0 on [0] and softmax1 on [1], got int",
    ),
    "the state of a part of another kind": (
        continued(state_of(mixed(part(FAVOR, 0, num_features=8), part("softmax", 1)))),
        "favor: state.far_max must be [2, 1, 16] for these inputs, got [2, 1, 8]; "
        "it comes from another batch or mechanism",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, text = ERRORS[name]
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == text


def test_a_state_that_was_cut() -> None:
    attention = CASES["favor-and-softmax"]()
    state = state_of(attention)
    with pytest.raises(errors.ShapeError, match=r"^mixed: state must be one that extend returned for favor0 on \[0\]"):
        attention.extend(*make_inputs(attention, 9), tuple.__new__(type(state), state[:3]))
