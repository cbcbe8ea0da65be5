"""What may cross into the engines: every pointer, number and state, and what is said of those that may not."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad
from subquad import FavorAttention, LinearAttention, Mechanism, SoftmaxAttention, attention, errors
from subquad.kernels.cpu import gate, library
from subquad.kernels.cpu.library import Array, Backward, Forward, Problem, Step
from subquad.kernels.problem import FLOOR
from subquad.mechanisms.favor_state import FavorState
from subquad.testing import assert_close, make_inputs

NUMBERS = {
    "dtype": 0,
    "kind": 0,
    "rule": 1,
    "rule_groups": 1,
    "batch": 2,
    "key_heads": 3,
    "groups": 2,
    "map_heads": 3,
    "head_dim": 4,
    "value_dim": 5,
    "num_features": 8,
    "sinks": 2,
    "causal": 1,
    "gaussian": 0,
    "near_blocks": 1,
    "near": 4,
    "reach": 1,
    "far": 1,
    "mask_batch": 2,
    "block": 4,
    "blocks_per_segment": 2,
    "threads": 2,
    "slices": 1,
    "stretches": 1,
    "tile": 64,
    "length": 9,
    "key_length": 9,
}


def tensors_of(structure: type, **numbers: int) -> dict[str, Tensor]:
    """Right ones, for every pointer."""
    plan = gate.Plan(**NUMBERS | numbers)
    return {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in plan._pointers[structure].items()}


def fill(structure: type, tensors: dict[str, Any], **numbers: int) -> Any:
    plan = gate.plan(**NUMBERS | numbers)  # the same one for many calls
    return plan.problem(1.0, **tensors) if structure is Problem else plan.fill(structure(), **tensors)


def message(call: Callable[[], object], kind: type) -> str:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert isinstance(caught.value, kind), caught.value
    return str(caught.value)


# Declarations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [Problem, Forward, Backward, Step])
def test_every_pointer_is_declared(structure: Any) -> None:
    pointers = {name for name, kind in structure._fields_ if kind in (ctypes.c_void_p, Array)}
    assert set(gate.FIELDS[structure]) == pointers
    assert pointers == set(fill(structure, tensors_of(structure)).tensors)


def test_one_tensor_for_two_pointers_is_checked_for_both() -> None:
    """A map of queries and keys alike is looked at once; what is declared otherwise is not that."""
    tensors = tensors_of(Problem)
    query = tensors["query"]
    given = fill(Problem, tensors | {"key": query})
    assert given.query == given.key == query.data_ptr()
    for other in ("key_bias", "offset_weight", "far_sum"):
        pair = {name: tensor for name, tensor in tensors.items() if name not in ("query", other)}
        with pytest.raises(errors.ShapeError, match=f"cpu engine: {other} must be "):
            fill(Problem, pair | {"query": query, other: query})


def test_every_number_is_declared() -> None:
    numbers = {name for name, kind, *_ in Problem._fields_ if kind in (ctypes.c_int32, ctypes.c_int64)}
    assert set(gate.NUMBERS) == numbers


def test_only_the_gate_takes_addresses() -> None:
    package = Path(subquad.__file__).parent
    takers = {path.name for path in package.rglob("*.py") if "data_ptr()" in path.read_text()}
    assert takers == {"gate.py", "engine.py"}  # the latter words the errors of the former


@pytest.mark.parametrize("structure", [Problem, Forward, Backward, Step])
def test_every_pointer_is_checked(structure: Any) -> None:
    """Each of them: its dtype, its sizes, that it is there."""
    right = tensors_of(structure)
    fill(structure, right)
    for name, tensor in right.items():
        wrong = {
            "dtype": tensor.to(torch.float64),
            "size": torch.cat([tensor, tensor]),
            "rank": tensor[None],
            "meta": tensor.to("meta"),
            "dense": torch.stack([tensor, tensor], -1)[..., 0],
        }
        for what, odd in wrong.items():
            with pytest.raises(errors.SubquadError, match=f"cpu engine: {name} "):
                fill(structure, right | {name: odd})
            assert what
    for name in gate.NEEDED[structure]:
        with pytest.raises(errors.ShapeError, match=f"cpu engine: {name} is missing"):
            fill(structure, {n: t for n, t in right.items() if n != name})


STEP_NUMBERS = NUMBERS | {"length": 1, "key_length": 1, "causal": 0, "mask_batch": 1}


def tensors_of_step(plan: gate.StepPlan) -> tuple[list[Any], list[Any]]:
    """Right ones for `given`, and for `read`: real, length and those that are kept."""
    of_problem, of_step = plan._pointers[Problem], plan._pointers[Step]
    inputs = [of_problem[name] for name in gate.INPUTS]
    state = [of_step[name] for name in ("real", "length", *library.KEPT)]
    return [torch.zeros(p.shape, dtype=p.dtype) for p in inputs], [torch.zeros(p.shape, dtype=p.dtype) for p in state]


def spoiled(tensor: Tensor) -> list[Any]:
    gaps = torch.stack([tensor, tensor], -1)[..., 0]
    cut_short = tensor.clone()
    cut_short.untyped_storage().resize_(1)
    wrong = [tensor.double(), tensor.int(), torch.cat([tensor, tensor]), tensor[None], tensor.to("meta")]
    return [*wrong, gaps, cut_short, tensor.to_sparse(), fake(tensor), [1.0]]


def test_every_pointer_of_a_step_is_checked() -> None:
    """Those that stand in an order, too; and a state lacks nothing."""
    plan = gate.StepPlan(1.0, **STEP_NUMBERS)
    inputs, state = tensors_of_step(plan)
    given, read = plan.given(inputs), plan.read(state[0], state[1], state[2:])
    assert [given.q.data, given.offset_bias] == [inputs[0].data_ptr(), inputs[-1].data_ptr()]
    assert read == [tensor.data_ptr() for tensor in state]
    for place, name in enumerate(gate.INPUTS):
        for odd in (*spoiled(inputs[place]), *([None] if name in ("q", "query", "key_bias", "offset_bias") else [])):
            with pytest.raises(errors.SubquadError, match=f"cpu engine: {name} "):
                plan.given([*inputs[:place], odd, *inputs[place + 1 :]])
    for place, name in enumerate(("real", "length", *library.KEPT)):
        for odd in (*spoiled(state[place]), *([] if name == "real" else [None])):
            real, length, *kept = [*state[:place], odd, *state[place + 1 :]]
            with pytest.raises(errors.SubquadError, match=f"cpu engine: {name} "):
                plan.read(real, length, kept)
    with pytest.raises(errors.ConfigError, match="root must lie"):
        gate.StepPlan(float("nan"), **STEP_NUMBERS)


def test_one_tensor_for_two_pointers_of_a_step() -> None:
    plan = gate.StepPlan(1.0, **STEP_NUMBERS)
    inputs, _ = tensors_of_step(plan)
    query = gate.INPUTS.index("query")
    inputs[query + 1] = inputs[query]
    assert plan.given(inputs).key == inputs[query].data_ptr()
    inputs[query + 2] = inputs[query]
    with pytest.raises(errors.ShapeError, match="cpu engine: key_bias must be "):
        plan.given(inputs)


def test_a_step_without_a_map_has_as_many_features_as_dims() -> None:
    for features, right in ((4, True), (8, False)):
        plan = gate.StepPlan(1.0, **STEP_NUMBERS | {"kind": 1, "sinks": 0, "near_blocks": 0, "num_features": features})
        inputs, state = tensors_of_step(plan)
        inputs = inputs[:3] + [None] * 5
        assert len(plan.read(None, None, state[-3:])) == 2 + len(library.KEPT)
        if right:
            assert plan.given(inputs).query is None
        else:
            assert message(lambda plan=plan, inputs=inputs: plan.given(inputs), errors.ShapeError) == (
                "cpu engine: query is missing"
            )


@pytest.mark.parametrize(
    ("structure", "name"), [(Problem, "far_max"), (Problem, "offset_bias"), (Forward, "borders_max")]
)
def test_what_goes_together_comes_together(structure: Any, name: str) -> None:
    tensors = tensors_of(structure)
    del tensors[name]
    assert message(lambda: fill(structure, tensors), errors.ShapeError) == f"cpu engine: {name} is missing"


@pytest.mark.parametrize("name", ["sink_k", "sink_seen", "key_bias", "query"])
def test_what_the_numbers_ask_for_is_there(name: str) -> None:
    tensors = tensors_of(Problem)
    del tensors[name]
    with pytest.raises(errors.ShapeError, match=f"cpu engine: {name} is missing"):
        fill(Problem, tensors)


def test_without_a_map_there_are_as_many_features_as_dims() -> None:
    """C++ reads the features where the tokens lie."""
    tensors = {name: tensors_of(Problem, kind=1)[name] for name in ("q", "k", "v", "sink_k", "sink_v", "sink_seen")}
    assert message(lambda: fill(Problem, tensors, kind=1), errors.ShapeError) == "cpu engine: query is missing"


# Tensors --------------------------------------------------------------------------------------------------------------


def cut(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(8)
    return x


def fake(x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(x.shape, dtype=x.dtype)


def misaligned(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(x.numel() * 4 + 1), dtype=torch.float32, offset=1).view(x.shape)


def negative(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.complex64).conj().imag.contiguous()


TENSORS: dict[str, tuple[Callable[[Tensor], Any], type, str]] = {
    "a list": (lambda _: [1.0], errors.DtypeError, "must be a torch.Tensor, got list"),
    "bfloat16": (lambda x: x.bfloat16(), errors.DtypeError, "must be float32, got bfloat16"),
    "another shape": (lambda x: x[:, :1], errors.ShapeError, "must be [2, 3, 8, 6], got [2, 1, 8, 6]"),
    "elsewhere": (lambda x: x.to("meta"), errors.BackendError, "must be on the CPU, got meta"),
    "sparse": (
        lambda x: x.to_sparse(),
        errors.BackendError,
        "must be a dense tensor, got sparse_coo; use .to_dense() or padding",
    ),
    "gaps": (
        lambda x: torch.stack([x, x], -1)[..., 0],
        errors.BackendError,
        "must have its numbers side by side, got strides [288, 96, 12, 2]",
    ),
    "a storage that was cut": (cut, errors.BackendError, "reaches over 1152 bytes, but its storage was cut to 8"),
    "an odd address": (misaligned, errors.BackendError, "begins in the middle of a number; use .clone()"),
    "no memory": (
        lambda x: getattr(torch, "_efficientzerotensor")(x.shape),  # noqa: B009
        errors.BackendError,
        "has no memory of its own; use .clone()",
    ),
    "fake": (fake, errors.BackendError, "is a FakeTensor, which has no numbers that C++ could read"),
}


@pytest.mark.parametrize(("change", "kind", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_cannot_be_read(change: Callable[[Tensor], Any], kind: type, words: str) -> None:
    tensors = tensors_of(Step)
    tensors["far_sum"] = change(tensors["far_sum"])
    assert message(lambda: fill(Step, tensors), kind) == f"cpu engine: far_sum {words}"


def test_a_lazy_negative_is_not_read_as_it_lies() -> None:
    tensors = tensors_of(Problem, head_dim=1)
    tensors["q"] = torch.zeros(2, 6, 9, 1, dtype=torch.complex64).conj().imag
    words = message(lambda: fill(Problem, tensors, head_dim=1), errors.BackendError)
    assert words == "cpu engine: q is negated lazily; use .resolve_neg()"


def test_strides_that_are_not_stepped_over_do_not_count() -> None:
    """A stride of 2**62 in a dimension of one: C++ multiplies it by the size of a number."""
    tensors = tensors_of(Problem, batch=1, mask_batch=1)
    tensors["q"] = torch.as_strided(tensors["q"], (1, 6, 9, 4), (2**62, 4, 24, 1))
    given = fill(Problem, tensors, batch=1, mask_batch=1)
    assert (given.q.batch, given.q.head, given.q.token) == (0, 4, 24)


def test_rows_may_have_strides_and_no_memory_beyond() -> None:
    tensors = tensors_of(Problem)
    base = torch.zeros(2, 9, 6, 4)
    tensors["q"] = base.transpose(1, 2)
    given = fill(Problem, tensors)
    assert (given.q.data, given.q.batch, given.q.head, given.q.token) == (base.data_ptr(), 216, 4, 24)
    tensors["q"] = torch.zeros(1, 1, 1, 4).expand(2, 6, 9, 4)
    assert fill(Problem, tensors).q.token == 0
    tensors["q"] = base.transpose(1, 2)
    base.untyped_storage().resize_(base.numel() * 4 - 4)
    words = message(lambda: fill(Problem, tensors), errors.BackendError)
    assert words == "cpu engine: q reaches over 1728 bytes, but its storage was cut to 1724"
    tensors["q"] = torch.zeros(2, 6, 4, 9).transpose(2, 3)
    words = message(lambda: fill(Problem, tensors), errors.BackendError)
    assert words == "cpu engine: q must have its numbers side by side, got strides [216, 36, 1, 9]"


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gate.NUMBERS)
def test_every_number_has_bounds(name: str) -> None:
    for value in (gate.NUMBERS[name][0] - 1, gate.NUMBERS[name][1] + 1, 2**70):
        words = message(lambda value=value: gate.Plan(**NUMBERS | {name: value}), errors.ConfigError)
        low, high = gate.NUMBERS[name]
        assert words == f"cpu engine: {name} must lie between {low} and {high}, got {value}"


TOGETHER = {
    "heads of the map": ({"map_heads": 2}, "map_heads must be 1 or 3, got 2"),
    "rows of the masks": ({"batch": 4}, "mask_batch must be 1 or 4, got 2"),
    "groups": ({"rule_groups": 3}, "features that are left over by the groups must be 0, got 2"),
    "slices of features": ({"slices": 9}, "slices must lie between 1 and 8, got 9"),
    "slices of groups": ({"slices": 4, "rule": 2, "rule_groups": 2}, "slices must lie between 1 and 2, got 4"),
    "slices of others": ({"slices": 2, "kind": 1}, "slices must lie between 1 and 1, got 2"),
    "stretches of features": ({"stretches": 2}, "stretches must lie between 1 and 1, got 2"),
    "blocks that are not near": ({"near_blocks": 0, "block": 65}, "block must lie between 1 and 64, got 65"),
    "near blocks of a block": (
        {"near": 3},
        "tokens of a block that are left over by near blocks must be 0, got 1",
    ),
    "many near blocks": ({"block": 68}, "block must lie between 1 and 64, got 68"),
    "nothing at all": ({"near_blocks": 0, "sinks": 0, "far": 0}, f"sinks must lie between 1 and {gate.SIZE}, got 0"),
    "keys of blocks": ({"key_length": 8}, "key_length must be 9, got 8"),
    "keys of causal ones": ({"near_blocks": 0, "key_length": 8}, "key_length must be 9, got 8"),
}


@pytest.mark.parametrize(("numbers", "words"), TOGETHER.values(), ids=TOGETHER)
def test_numbers_fit_each_other(numbers: dict[str, int], words: str) -> None:
    assert message(lambda: gate.Plan(**NUMBERS | numbers), errors.ConfigError) == f"cpu engine: {words}"


def test_no_size_overflows() -> None:
    words = message(lambda: gate.Plan(**NUMBERS | {"num_features": 2**16, "value_dim": 2**16}), errors.ShapeError)
    assert (
        words == "cpu engine: the state of one head would have 4299162624 numbers, and the engine counts to 2147483647"
    )
    words = message(lambda: gate.Plan(**NUMBERS | {"reach": 2**22}), errors.ShapeError)
    assert words == (
        "cpu engine: the exact logits of one tile would have 2147484544 numbers, and the engine counts to 2147483647"
    )
    many = {"batch": 2**30, "mask_batch": 1, "length": 2**36, "key_length": 2**36}
    words = message(lambda: gate.Plan(**NUMBERS | many), errors.ShapeError)
    assert words.startswith("cpu engine: q would have ")


@pytest.mark.parametrize("root", [0.0, -1.0, float("nan"), float("inf")])
def test_the_root_is_a_number(root: float) -> None:
    plan = gate.Plan(**NUMBERS)
    assert "cpu engine: root must lie between" in message(lambda: plan.problem(root), errors.ConfigError)


# States ---------------------------------------------------------------------------------------------------------------

NAMES = {
    "favor": lambda: FavorAttention(8, 16, near=4, sinks=2),
    "paper": lambda: FavorAttention(8, 16, near=0, sinks=0),
    "linear": lambda: LinearAttention(8),
    "linear-exp": lambda: LinearAttention(8, feature_map="exp"),
    **{
        name: lambda name=name: attention(name, head_dim=8)
        for name in ("softmax", "window", "strided", "pages", "lsh", "cluster")
    },
    "cluster-favor": lambda: attention("cluster", head_dim=8, inside="favor", num_features=16),
    "fixed": lambda: attention("strided", head_dim=8, stride=4, pattern="fixed"),
    "pages-stored": lambda: attention("pages", head_dim=8),
    "pages-early": lambda: attention("pages", head_dim=8, page=4, window=4, sinks=2),
}


def state_of(mechanism: Mechanism, dtype: torch.dtype, length: int = 7) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
    """One more token, and the state of those before."""
    inputs = make_inputs(mechanism, length).to(dtype)
    with torch.no_grad():
        q, k, v = inputs.tokens(length - 1, length)
        return (q, k, v), mechanism.extend(*inputs.tokens(0, length - 1))[1]


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_another_precision_is_converted(name: str, dtype: torch.dtype, given: torch.dtype) -> None:
    """As if the caller had converted it: the same bits. The maximum of no key is below what half precision holds."""
    mechanism = NAMES[name]()
    token, state = state_of(mechanism, dtype)
    rounded = type(state)(*(t.to(given) if t.is_floating_point() else t for t in state))
    by_hand = type(state)(*(r.to(t.dtype) for r, t in zip(rounded, state, strict=True)))
    if "far_max" in by_hand._fields:
        by_hand = by_hand._replace(far_max=by_hand.far_max.clamp(min=FLOOR))
    with torch.no_grad():
        out, after = mechanism.extend(*token, rounded)
        want, want_after = mechanism.extend(*token, by_hand)
    assert torch.equal(out, want)
    assert out.isfinite().all()
    for got, right in zip(after, want_after, strict=True):
        assert got.dtype == right.dtype
        assert torch.equal(got, right)


@pytest.mark.parametrize("name", NAMES)
def test_states_in_which_a_field_is_wrong(name: str) -> None:
    mechanism = NAMES[name]()
    token, state = state_of(mechanism, torch.float32)
    for field, tensor in state._asdict().items():
        wanted = str(tensor.dtype).removeprefix("torch.")
        odd = {torch.float32: torch.complex64, torch.int64: torch.int32, torch.bool: torch.uint8}[tensor.dtype]
        op = f"{mechanism.name}: state.{field}"
        for value, kind, words in (
            (tensor.to(odd), errors.DtypeError, f"must be {wanted}, got {str(odd).removeprefix('torch.')}"),
            (None, errors.DtypeError, "must be a torch.Tensor, got NoneType"),
            (tensor.tolist(), errors.DtypeError, "must be a torch.Tensor, got list"),
            (
                tensor.to_sparse(),
                errors.BackendError,
                "must be a dense tensor, got sparse_coo; use .to_dense() or padding",
            ),
        ):
            spoiled = state._replace(**{field: value})
            assert message(lambda spoiled=spoiled: mechanism.extend(*token, spoiled), kind) == f"{op} {words}"


@pytest.mark.parametrize("value", [-1, -(2**63), 2**62, 2**63 - 1])
@pytest.mark.parametrize("name", ["favor", "paper", "window", "strided", "pages", "fixed"])
def test_lengths_out_of_bounds(name: str, value: int) -> None:
    mechanism = NAMES[name]()
    token, state = state_of(mechanism, torch.float32)
    spoiled = state._replace(length=torch.tensor([3, value]))
    assert message(lambda: mechanism.extend(*token, spoiled), errors.ShapeError) == (
        f"{mechanism.name}: state.length must lie between 0 and {2**62 - 1}, got {value}; "
        "it comes from another mechanism, or was changed"
    )


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("near", [0, 4])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 2**31, 2**40 + 1, 2**62 - 1])
def test_any_length_can_be_extended(length: int, near: int, backend: str) -> None:
    """Whatever a state says of its length, both engines read what it holds, and the same of it."""
    mechanism = FavorAttention(8, 16, near=near, sinks=2, backend=backend)
    token, state = state_of(mechanism, torch.float32)
    changed = state._replace(length=torch.full_like(state.length, length))
    exact = FavorState(*(t.double() if t.is_floating_point() else t for t in changed))
    with torch.no_grad():
        out, after = mechanism.extend(*token, changed)
        q, k, v = (t.double() for t in token)
        want, _ = FavorAttention(8, 16, near=near, sinks=2).extend(q, k, v, exact)
    assert_close(out, want, 1e-5)
    assert after.length.tolist() == [length + 1] * 2


def test_the_native_step_looks_at_lengths_itself() -> None:
    """Below the mechanism, where states of others arrive too."""
    from subquad.kernels.favor import native

    mechanism = FavorAttention(8, 16, near=4, sinks=2)
    token, state = state_of(mechanism, torch.float32)
    for field, value, words in (
        ("length", torch.tensor([0, -1]), f"length counts tokens, so it must lie between 0 and {2**62 - 1}, got -1"),
        ("length", torch.tensor([0, 1], dtype=torch.int32), "length must be int64, got int32"),
        ("far_sum", state.far_sum.bfloat16(), "far_sum must be float32, got bfloat16"),
        ("far_max", state.far_max.double(), "far_max must be float32, got float64"),
        ("block_k", state.block_k.bfloat16(), "block_k must be float32, got bfloat16"),
        ("sink_v", state.sink_v[..., :3], "sink_v must be [2, 2, 2, 5], got [2, 2, 2, 3]"),
    ):
        spoiled = state._replace(**{field: value})
        with pytest.raises(errors.SubquadError) as caught:
            native.step(*token, mechanism.feature_map, None, spoiled, mechanism.options)  # pyright: ignore
        assert str(caught.value) == f"cpu engine: {words}"


STATES = {
    "strided": (
        lambda s: s._replace(length=torch.tensor([6, 7])),
        "strided: state.length says 7 tokens, but its keys hold 6; the state was changed",
    ),
    "fixed": (
        lambda s: s._replace(length=torch.tensor([6, 8])),
        "strided: state.length says 8 tokens, but its summaries and its block hold 7; the state was changed",
    ),
    "pages": (
        lambda s: s._replace(length=torch.tensor([6, 149])),
        "pages: state.length says 149 tokens, but 0 pages of 16 are stored, 4 tokens are sinks and 144 can wait; "
        "the state was changed",
    ),
    "pages-stored": (
        lambda s: s._replace(stored=torch.tensor([0, 1])),
        "pages: state.stored says 1 pages, but the state holds 0; it was changed",
    ),
    "pages-early": (
        lambda s: s._replace(length=torch.tensor([6, 3])),
        "pages: state.length says 3 tokens, but 1 pages of 4 are stored, 2 tokens are sinks and 8 can wait; "
        "the state was changed",
    ),
    "softmax": (
        lambda s: s._replace(v=s.v[:, :, 1:]),
        "softmax: state.v must be [2, 2, 6, 5] for these inputs, got [2, 2, 5, 5]; "
        "it comes from another batch or mechanism",
    ),
    "lsh": (
        lambda s: s._replace(waiting=torch.tensor([0, 3])),
        "lsh: state.waiting must be the same for all sequences, got 0 and 3; the state was put together from several",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states_whose_fields_contradict_each_other(name: str) -> None:
    mechanism = NAMES[name]()
    token, state = state_of(mechanism, torch.float32)
    change, words = STATES[name]
    assert message(lambda: mechanism.extend(*token, change(state)), errors.ShapeError) == words


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("counts", 2**40, f"0 and {2**40 - 1}"),
        ("counts", -1, f"0 and {2**40 - 1}"),
        ("waiting", 129, "0 and 128"),
        ("tail_name", 64 * 2**40, f"{-(2**41)} and {64 * 2**40 - 1}"),
        ("tail_name", -(2**41) - 1, f"{-(2**41)} and {64 * 2**40 - 1}"),
    ],
)
def test_numbers_of_buckets_have_bounds(field: str, value: int, bounds: str) -> None:
    mechanism = NAMES["lsh"]()
    token, state = state_of(mechanism, torch.float32)
    spoiled = state._replace(**{field: torch.full_like(getattr(state, field), value)})
    assert message(lambda: mechanism.extend(*token, spoiled), errors.ShapeError) == (
        f"lsh: state.{field} must lie between {bounds}, got {value}; it comes from another mechanism, or was changed"
    )


def test_a_state_of_another_function_is_refused() -> None:
    """What M is, only the function says: one feature would be spread over all of them."""
    token, state = state_of(LinearAttention(8, feature_map=lambda x: x[..., :1].exp()), torch.float64)
    for tokens in (token, tuple(torch.cat([t, t], 2) for t in token)):
        q, k, v = tokens
        with pytest.raises(errors.ShapeError) as caught:
            LinearAttention(8, feature_map=torch.exp).extend(q, k, v, state)
        words = "linear: state.far_sum is of 1 features, but feature_map returned 8"
        of_operator = "linear_forward: far_sum must be [2, 2, 8, 6], got [2, 2, 1, 6]"
        assert str(caught.value) == (words if tokens is token else of_operator)


def test_a_tuple_that_claims_to_be_a_state() -> None:
    mechanism = SoftmaxAttention(8)
    token, state = state_of(mechanism, torch.float32)
    short = tuple.__new__(type(state), state[:1])
    words = "softmax: state must be a SoftmaxState returned by extend, got SoftmaxState"
    assert message(lambda: mechanism.extend(*token, short), errors.ShapeError) == words


# Around the call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", [0, 4])
def test_default_dtype_and_device_do_not_matter(near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own tensors are float32 on the CPU, whatever torch makes by default."""
    for mechanism in (FavorAttention(8, 16, near=near), LinearAttention(8), LinearAttention(8, feature_map="exp")):
        inputs = make_inputs(mechanism, 9).to(torch.float32)
        want, state = mechanism.extend(*inputs.tokens(0, 8))
        step, _ = mechanism.extend(*inputs.tokens(8, 9), state)
        gradient = torch.autograd.grad(
            mechanism(*inputs.leaves()[:1], *inputs[1:]).sum(), inputs.leaves()[:1], allow_unused=True
        )
        assert gradient
        settings: Any = (
            (torch.set_default_dtype, torch.float64, torch.float32),
            (torch.set_default_device, "meta", None),
        )
        for setting, value, usual in settings:
            setting(value)
            try:
                out, after = mechanism.extend(*inputs.tokens(0, 8))
                more, _ = mechanism.extend(*inputs.tokens(8, 9), after)
            finally:
                setting(usual)
            assert torch.equal(out, want)
            assert torch.equal(more, step)
            assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))


def test_a_gradient_of_another_dtype_is_converted() -> None:
    """A hook may hand on what autograd itself would refuse."""
    mechanism = FavorAttention(8, 16, near=4, backend="cpu")
    inputs = make_inputs(mechanism, 9).to(torch.float32).leaves()
    want = torch.autograd.grad(mechanism(*inputs).sum(), inputs)
    grad = torch.ones(2, 4, 9, 5, dtype=torch.float64)
    from subquad.kernels.operator import grad_or_zeros

    assert grad_or_zeros(grad, torch.zeros(1)).dtype == torch.float32
    out = mechanism(*inputs)
    for g, w in zip(torch.autograd.grad(out, inputs, torch.ones(1).expand_as(out)), want, strict=True):
        assert torch.equal(g, w)


LARGE: dict[str, tuple[Callable[[int], Mechanism], tuple[bool, ...]]] = {
    "near": (lambda n: FavorAttention(4, 8, near=n, backend="torch"), (False, True)),
    "chunk": (lambda n: FavorAttention(4, 8, near=3, chunk=n, backend="torch"), (False, True)),
    "chunk without near": (lambda n: FavorAttention(4, 8, near=0, chunk=n, backend="torch"), (False, True)),
    "chunk of linear": (lambda n: LinearAttention(4, chunk=n, backend="torch"), (False, True)),
    "native chunk": (lambda n: LinearAttention(4, chunk=n, backend="cpu"), (False, True)),
    "dilation": (lambda n: attention("window", head_dim=4, window=4, dilation=n), (False, True)),
    "window": (lambda n: attention("window", head_dim=4, window=n), (False, True)),
    "stride": (lambda n: attention("strided", head_dim=4, stride=n), (False, True)),
    "summaries": (lambda n: attention("strided", head_dim=4, stride=n, pattern="fixed"), (False, True)),
    "pages": (lambda n: attention("pages", head_dim=4, pages=n, page=2, window=4), (True,)),
    "page": (lambda n: attention("pages", head_dim=4, page=n, window=0), (True,)),
    "window of pages": (lambda n: attention("pages", head_dim=4, page=2, window=n), (True,)),
    "sinks": (lambda n: attention("pages", head_dim=4, page=2, window=2, sinks=n), (True,)),
    "bucket_size": (lambda n: attention("lsh", head_dim=4, num_buckets=2, bucket_size=n), (False, True)),
}


@pytest.mark.parametrize("name", LARGE)
def test_options_beyond_the_sequence_take_no_memory(name: str) -> None:
    """2**40 of anything is as much as the sequence has."""
    make, directions = LARGE[name]
    mechanism = make(2**40)
    dtype = torch.float32 if name == "native chunk" else torch.float64
    inputs = make_inputs(mechanism, 21).to(dtype).leaves()
    for causal in directions:
        out, want = mechanism(*inputs, causal=causal), mechanism.reference(*inputs, causal=causal)
        assert_close(out, want, 1e-5 if dtype == torch.float32 else 1e-9, f"causal={causal}")


def test_labels_of_windows_hold_any_length() -> None:
    """Labels are int32, positions are not."""
    mechanism = attention("window", head_dim=8, window=4, global_tokens=2)
    token, state = state_of(mechanism, torch.float64)
    with torch.no_grad():
        outs = [
            mechanism.extend(*token, state._replace(length=torch.full((2,), n)))[0] for n in (100, 2**31 + 7, 2**40)
        ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


# Operators ------------------------------------------------------------------------------------------------------------


def favor_arguments(**others: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    arguments = {
        "q": new(2, 4, 5, 8),
        "k": new(2, 2, 5, 8),
        "v": new(2, 2, 5, 3),
        "sink_k": new(2, 2, 1, 8),
        "sink_v": new(2, 2, 1, 3),
        "query": new(1, 6, 8),
        "key": new(1, 6, 8),
        "key_bias": new(1, 6),
        "offset_weight": None,
        "offset_bias": None,
        "alive": None,
        "fold": None,
        "sink_seen": torch.ones(1, 5, dtype=torch.int64),
        "far_max": None,
        "far_sum": None,
        "rule": "norm",
        "groups": 1,
        "near": 2,
        "sinks": 1,
        "causal": True,
        "scale": 0.5,
        "gaussian": False,
        "chunk": 0,
        "borders": True,
        "backend": "cpu",
        "reach": 1,
        "far": True,
    }
    assert set(others) <= set(arguments)
    return arguments | others


def linear_arguments(**others: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.rand(2, 4, 5, 8),
        "k": torch.rand(2, 2, 5, 8),
        "v": torch.rand(2, 2, 5, 3),
        "weight": None,
        "log_weight": None,
        "alive": None,
        "far_max": None,
        "far_sum": None,
        "feature_map": "elu1",
        "causal": True,
        "root": 1.0,
        "chunk": 0,
        "borders": True,
        "backend": "cpu",
    }
    assert set(others) <= set(arguments)
    return arguments | others


x = torch.randn(2, 2, 5, 8)
OPERATORS: dict[str, tuple[dict[str, Any], type, str]] = {
    "no q": ({"q": None}, errors.ShapeError, "q is missing"),
    "no key": ({"key": None}, errors.ShapeError, "key is missing"),
    "integers": ({"q": x.int()}, errors.DtypeError, "q must be float16 or bfloat16 or float32 or float64, got int32"),
    "two dtypes": ({"v": x.double()}, errors.DtypeError, "v must be float32, got float64"),
    "three dims": ({"k": x[0]}, errors.ShapeError, "k must be [2, K, S, 8], got [2, 5, 8]"),
    "another length": ({"v": x[:, :, :3]}, errors.ShapeError, "v must be [2, 2, 5, 8], got [2, 2, 3, 8]"),
    "no tokens": ({"q": torch.rand(2, 4, 0, 8)}, errors.ShapeError, "q must have no empty dimension, got [2, 4, 0, 8]"),
    "heads": (
        {"q": torch.rand(2, 3, 5, 8)},
        errors.ShapeError,
        "the heads of q must be a multiple of those of k, got 3 and 2",
    ),
    "queries": (
        {"q": torch.rand(2, 4, 4, 8), "sink_seen": torch.ones(1, 4, dtype=torch.int64)},
        errors.ShapeError,
        "near blocks and causal attention need as many queries as keys, got 4 and 5",
    ),
    "flags": ({"alive": torch.ones(1, 5)}, errors.DtypeError, "alive must be bool, got float32"),
    "rows of flags": (
        {"alive": torch.ones(3, 5, dtype=torch.bool)},
        errors.ShapeError,
        "alive must be [2 or 1, 5], got [3, 5]",
    ),
    "sinks that nobody sees": ({"sink_seen": None}, errors.ShapeError, "sink_seen is missing"),
    "half a state": ({"far_sum": torch.rand(2, 2, 6, 4)}, errors.ShapeError, "far_max is missing"),
    "a state of half precision": (
        {"far_max": torch.rand(2, 2, 6).bfloat16(), "far_sum": torch.rand(2, 2, 6, 4)},
        errors.DtypeError,
        "far_max must be float32, got bfloat16",
    ),
    "a past without an order": (
        {"far_max": torch.rand(2, 2, 6), "far_sum": torch.rand(2, 2, 6, 4), "causal": False},
        errors.ShapeError,
        "far_sum must be left out: a state belongs to causal attention",
    ),
    "elsewhere": (
        {"query": torch.rand(1, 6, 8, device="meta")},
        errors.BackendError,
        "query is on meta, q on cpu; move one of them",
    ),
    "maps": (
        {n: torch.rand(3, 6, 8) for n in ("query", "key")} | {"key_bias": torch.rand(3, 6)},
        errors.ConfigError,
        "heads of the map must be 1 or 2, got 3",
    ),
    "a rule": ({"rule": "x"}, errors.ConfigError, "rule must be one of none, norm, groups, got 'x'"),
    "groups": ({"groups": 4}, errors.ConfigError, "6 features do not fall into groups=4"),
    "no groups": ({"groups": 0}, errors.ConfigError, "groups must be a whole number of at least 1, got 0"),
    "near": ({"near": -1}, errors.ConfigError, "near must be a whole number of at least 0, got -1"),
    "chunk": ({"chunk": -5}, errors.ConfigError, "chunk must be a whole number of at least 0, got -5"),
    "scale": ({"scale": -1.0}, errors.ConfigError, "scale must be a positive finite number, got -1.0"),
    "sinks": (
        {"sinks": 2},
        errors.ShapeError,
        "sink_k must be [2, 2, 2, 8], got [2, 2, 1, 8]",
    ),
    "more sinks than tokens": ({"sinks": 6, "sink_k": None, "sink_v": None}, errors.ShapeError, "sink_k is missing"),
    "half of the sinks": ({"sink_k": None}, errors.ShapeError, "sink_k is missing"),
    "backend": (
        {"backend": "gpu"},
        errors.ConfigError,
        "backend must be one of cpu, torch, got 'gpu' (did you mean 'cpu'?)",
    ),
}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize(("others", "kind", "words"), OPERATORS.values(), ids=OPERATORS)
def test_operators_called_directly(others: dict[str, Any], kind: type, words: str, engine: str) -> None:
    if "v" in others and others["v"].shape[2] == 3:
        others = others | {"sink_v": torch.rand(2, 2, 1, 8)}
    call = torch.ops.subquad.favor_forward
    assert message(lambda: call(**favor_arguments(**{"backend": engine} | others)), kind) == f"favor_forward: {words}"


def test_the_linear_operator_called_directly() -> None:
    call = torch.ops.subquad.linear_forward
    words = message(lambda: call(**linear_arguments(feature_map="exp")), errors.ConfigError)
    assert words == "linear_forward: feature_map must be one of elu1, relu, softplus, relu2, identity, got 'exp'"
    words = message(lambda: call(**linear_arguments(log_weight=torch.rand(2, 2, 5))), errors.ShapeError)
    assert words == "linear_forward: log_weight must be left out: backend='cpu' has no signed (trigonometric) features"
    past = {"far_max": torch.zeros(2, 2, 1), "far_sum": torch.rand(2, 2, 8, 4)}
    words = message(lambda: call(**linear_arguments(causal=False, **past)), errors.ShapeError)
    assert words == "linear_forward: far_sum must be left out: a state belongs to causal attention"
    words = message(lambda: call(**linear_arguments(q=x.double(), k=x.double(), v=x.double())), errors.DtypeError)
    assert words == "cpu engine: q must be float32 or bfloat16 or float16, got float64"


def test_without_a_library_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LOADED", "there is none")
    words = message(lambda: torch.ops.subquad.linear_forward(**linear_arguments()), errors.BackendError)
    assert words == "cpu engine: cannot be used: there is none; use backend='torch'"


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_backwards_called_directly(engine: str) -> None:
    """Each of what the forward kept, of another shape or dtype, or missing."""
    for name, arguments in (("favor", favor_arguments(backend=engine)), ("linear", linear_arguments(backend=engine))):
        out, norm, _, borders_max, borders_sum, _, far_sum = getattr(torch.ops.subquad, f"{name}_forward")(**arguments)
        kept = {"grad_out": out, "out": out, "normaliser": norm, "low": torch.zeros_like(out, dtype=torch.int8)}
        kept |= {"borders_max": borders_max, "borders_sum": borders_sum, "grad_far_sum": far_sum}
        call = getattr(torch.ops.subquad, f"{name}_backward")
        call(**kept, want_map=True, **arguments)
        for field, tensor in kept.items():
            for odd in (tensor.double(), tensor[:0], tensor[..., :1], tensor[None]):
                if odd.shape == tensor.shape and odd.dtype == tensor.dtype:
                    continue
                with pytest.raises(errors.SubquadError, match=f"{name}_backward: {field} must "):
                    call(**kept | {field: odd}, want_map=True, **arguments)
            if field not in ("low", "grad_far_sum"):
                with pytest.raises(errors.ShapeError, match=f"{name}_backward: {field} is missing"):
                    call(**kept | {field: None}, want_map=True, **arguments)


def test_fake_operators_refuse_the_same() -> None:
    arguments = {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in favor_arguments().items()}
    assert torch.ops.subquad.favor_forward(**arguments)[0].shape == (2, 4, 5, 3)
    arguments["k"] = arguments["k"][:, :, :3]
    with pytest.raises(errors.ShapeError, match=re.escape("favor_forward: v must be [2, 2, 3, 3], got [2, 2, 5, 3]")):
        torch.ops.subquad.favor_forward(**arguments)


def test_blocks_that_do_not_exist() -> None:
    q, places = torch.rand(3, 4, 8), torch.zeros(3, 4, dtype=torch.int32)
    pairs = (torch.tensor([[0], [4], [1]]), places, places, None, None, None)
    words = message(
        lambda: torch.ops.subquad.sparse_forward(q, q, q, *pairs, 0, 0, 0, 0, 0, False, 1.0), errors.ShapeError
    )
    assert words == "sparse_forward: blocks must lie in 0..3, got 0..4"


def test_codes_of_the_wrong_kind() -> None:
    codes = torch.zeros(1, 2, 2, 5, dtype=torch.int64)
    words = message(lambda: torch.ops.subquad.bucket_forward(x, x, x, codes, codes, True, 1.0, 4), errors.DtypeError)
    assert words == "bucket_forward: q_code must be int32, got int64"


def test_tiles_beyond_the_sequence_take_no_memory() -> None:
    codes = torch.zeros(1, 2, 2, 5, dtype=torch.int32)
    outs = [torch.ops.subquad.bucket_forward(x, x, x, codes, codes, True, 1.0, tile)[0] for tile in (5, 2**40)]
    assert torch.equal(*outs)
