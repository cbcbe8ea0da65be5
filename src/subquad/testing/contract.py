"""The contract, one function per claim. Each takes a mechanism and raises AssertionError where the claim fails."""

import copy
import io

import torch
from torch import Tensor

from subquad.mechanism import Mechanism
from subquad.testing.inputs import Inputs, assert_close, gradients, make_inputs, make_mask
from subquad.testing.judging import Check, assert_raises, directions, exact, mask_kinds, poison_keys
from subquad.testing.numbers import (
    extreme_logits_are_right,
    lopsided_sizes_are_right,
    low_precision_is_as_good_as_it_can_be,
    outputs_are_convex_combinations,
    single_precision_is_single_precision,
)
from subquad.testing.states import (
    extend_equals_forward,
    joined_states_go_on_alone,
    masked_extend_equals_forward,
    state_does_not_grow,
    states_are_values,
)

LENGTHS = (1, 2, 3, 7, 8, 9, 31, 64, 65)


# The fast way is the definition ---------------------------------------------------------------------------------------


def forward_equals_reference(mechanism: Mechanism) -> None:
    for length in LENGTHS:
        inputs = make_inputs(mechanism, length, seed=length)
        for causal in directions(mechanism):
            want = mechanism.reference(*inputs, causal=causal)
            assert_close(mechanism(*inputs, causal=causal), want, exact(mechanism), f"length {length}, causal={causal}")


def masked_forward_equals_reference(mechanism: Mechanism) -> None:
    for length in (1, 9, 40):
        inputs = make_inputs(mechanism, length, batch=3, seed=length)
        for kind in mask_kinds(mechanism):
            mask = make_mask(length, kind)
            for causal in directions(mechanism):
                want = mechanism.reference(*inputs, causal=causal, key_mask=mask)
                got = mechanism(*inputs, causal=causal, key_mask=mask)
                assert_close(got, want, exact(mechanism), f"length {length}, {kind} padding, causal={causal}")


def gradients_equal_reference(mechanism: Mechanism) -> None:
    """Of q, k, v, and of what the mechanism learns."""
    mechanism = copy.deepcopy(mechanism).double()  # as exact as the inputs; random features stay what they are
    parameters = dict(mechanism.named_parameters())
    for length, kind in ((33, None), (40, "right"), (40, "left"), (40, "holes")):
        if kind is not None and kind not in mask_kinds(mechanism):
            continue
        mask = None if kind is None else make_mask(length, kind)
        for causal in directions(mechanism):
            inputs = make_inputs(mechanism, length, batch=3).leaves()
            leaves = (*inputs, *parameters.values())
            want = gradients(mechanism.reference(*inputs, causal=causal, key_mask=mask), leaves)
            got = gradients(mechanism(*inputs, causal=causal, key_mask=mask), leaves)
            for name, g, w in zip([*"qkv", *parameters], got, want, strict=True):
                assert_close(g, w, exact(mechanism), f"gradient of {name}, {kind} padding, causal={causal}")


def gradcheck(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 9, batch=1).leaves()
    for causal in directions(mechanism):
        assert torch.autograd.gradcheck(lambda *x, causal=causal: mechanism(*x, causal=causal), tuple(inputs))


def cross_attention_equals_reference(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 9, keys=21)
    if mechanism.positional or not mechanism.supports_bidirectional:
        causal = directions(mechanism)[0]
        assert_raises(lambda: mechanism(*inputs, causal=causal), "needs as many queries as keys")
        return
    assert_close(mechanism(*inputs), mechanism.reference(*inputs), exact(mechanism), "9 queries, 21 keys")


def unequal_causal_lengths_raise(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 9, keys=21)
    assert_raises(lambda: mechanism(*inputs, causal=True), "causal")


def what_is_not_supported_raises(mechanism: Mechanism) -> None:
    """A mechanism that cannot be causal, or nothing else, never pretends to be."""
    inputs = make_inputs(mechanism, 9)
    if not mechanism.supports_causal:
        assert_raises(lambda: mechanism(*inputs, causal=True), "causal")
        assert_raises(lambda: mechanism.attention_matrix(inputs.q, inputs.k, causal=True), "causal")
    if not mechanism.supports_bidirectional:
        assert_raises(lambda: mechanism(*inputs, causal=False), "causal")
        assert_raises(lambda: mechanism.attention_matrix(inputs.q, inputs.k, causal=False), "causal")
    if not mechanism.supports_state:
        assert_raises(lambda: mechanism.extend(*inputs), "extend")


def attention_matrix_is_the_definition(mechanism: Mechanism) -> None:
    q, k, _ = make_inputs(mechanism, 12, batch=3)
    mask = make_mask(12, "right")
    for causal in directions(mechanism):
        matrix = mechanism.attention_matrix(q, k, causal=causal, key_mask=mask)
        rows = torch.tensor([3, 0, 11])
        some = mechanism.attention_matrix(q, k, causal=causal, key_mask=mask, rows=rows)
        assert_close(some, matrix[:, :, rows], exact(mechanism), "rows of the matrix")
        if causal:
            assert not bool(matrix.triu(1).any()), "the causal matrix looks ahead"
        if mechanism.convex:
            total = matrix.sum(-1)
            assert bool(((total - 1).abs() < 1e-9).logical_or(total == 0).all()), "rows do not sum to 1"


# Masks ----------------------------------------------------------------------------------------------------------------


def padding_changes_nothing(mechanism: Mechanism) -> None:
    """A padded batch gives each sequence what it gets alone, forward and backward, whatever the padding holds."""
    for kind in mask_kinds(mechanism):
        length = 40
        mask = make_mask(length, kind)
        inputs = make_inputs(mechanism, length, batch=3)
        poisoned = poison_keys(inputs, mask).leaves()
        for causal in directions(mechanism):
            out = mechanism(*poisoned, causal=causal, key_mask=mask)
            out = out.masked_fill(~mask[:, None, :, None], 0)
            grads = gradients(out, poisoned)
            direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            for b in range(3):
                real = mask[b]
                alone = Inputs(*(t[:, :, real] for t in inputs.sequence(b))).leaves()
                want = mechanism(*alone, causal=causal)
                where = f"{kind} padding, sequence {b}, causal={causal}"
                assert_close(out[b : b + 1, :, real], want, exact(mechanism), where)
                for name, g, w in zip(
                    "qkv", grads, _gradients_along(want, alone, direction[b : b + 1, :, real]), strict=True
                ):
                    size = g.norm().item()  # one key alone has the gradient 0, up to rounding of what it is made of
                    assert_close(g[b : b + 1, :, real], w, exact(mechanism), f"gradient of {name}, {where}", size)


def _gradients_along(out: Tensor, inputs: Inputs, direction: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, direction, allow_unused=True, materialize_grads=True)


def rows_without_keys_are_zero(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 20, batch=2).leaves()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1] = False
    for causal in directions(mechanism):
        out = mechanism(*inputs, causal=causal, key_mask=mask)
        assert not bool(out[1].any()), f"causal={causal}: a sequence without keys must give zeros"
        assert bool(out[0].any())
        for name, g in zip("qkv", gradients(out, inputs), strict=True):
            assert bool(g.isfinite().all()), f"gradient of {name} is not finite"
            assert not bool(g[1].any()), f"gradient of {name} reaches a sequence without keys"


# Independence ---------------------------------------------------------------------------------------------------------


def causal_means_causal(mechanism: Mechanism) -> None:
    """Whatever a token becomes, as long as its square is a number, earlier outputs move by rounding only."""
    for dtype in (torch.float64, torch.float32):
        for length, token in ((9, 8), (40, 39), (40, 5), (40, 17)):
            inputs = make_inputs(mechanism, length).to(dtype)
            before = mechanism(*inputs, causal=True)[:, :, :token]
            for size in (1e4, -1e4, torch.finfo(torch.float32).max ** 0.45):
                changed = Inputs(*(t.clone() for t in inputs))
                for t in changed:
                    row = t[:, :, token]
                    t[:, :, token] = row * size if abs(size) == 1e4 else row.sign() * size
                after = mechanism(*changed, causal=True)[:, :, :token]
                assert_close(after, before, 1e-6, f"{dtype}, length {length}, token {token} of size {size:g}")


def batches_are_independent(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 30, batch=3)
    for causal in directions(mechanism):
        together = mechanism(*inputs, causal=causal)
        for b in range(3):
            alone = mechanism(*inputs.sequence(b), causal=causal)
            assert_close(together[b : b + 1], alone, exact(mechanism, 1e-12), f"sequence {b}, causal={causal}")


def chunk_changes_speed_only(mechanism: Mechanism) -> None:
    if not hasattr(mechanism, "chunk"):
        return
    length = 37
    inputs = make_inputs(mechanism, length).leaves()
    for causal in directions(mechanism):
        want = mechanism(*inputs, causal=causal)
        want_grads = gradients(want, inputs)
        for chunk in (1, 2, 5, 16, length, 2 * length):
            other = copy.deepcopy(mechanism)
            setattr(other, "chunk", chunk)  # noqa: B010 - not every mechanism has it
            got = other(*inputs, causal=causal)
            assert_close(got, want, exact(mechanism), f"chunk {chunk}, causal={causal}")
            for name, g, w in zip("qkv", gradients(got, inputs), want_grads, strict=True):
                assert_close(g, w, exact(mechanism), f"gradient of {name}, chunk {chunk}, causal={causal}")


def forward_is_a_function(mechanism: Mechanism) -> None:
    """Same bits twice, no draw from the global generator, inputs left alone, dtype and device kept."""
    causal = directions(mechanism)[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = make_inputs(mechanism, 20).to(dtype)
        copies = Inputs(*(t.clone() for t in inputs))
        generator = torch.random.get_rng_state()
        first, second = mechanism(*inputs, causal=causal), mechanism(*inputs, causal=causal)
        assert torch.equal(first, second), "two calls differ"
        assert torch.equal(generator, torch.random.get_rng_state()), "forward drew random numbers"
        assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True)), "forward changed its inputs"
        assert (first.dtype, first.device) == (dtype, inputs.q.device)


def layout_does_not_matter(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 20).leaves()
    strided = Inputs(*(t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)).leaves()
    strided = Inputs(*(t.transpose(0, 3).contiguous().transpose(0, 3) for t in strided))
    assert not strided.q.is_contiguous()
    for causal in directions(mechanism):
        want, got = mechanism(*inputs, causal=causal), mechanism(*strided, causal=causal)
        assert_close(got, want, exact(mechanism), f"non-contiguous inputs, causal={causal}")


# Modules --------------------------------------------------------------------------------------------------------------


def modules_can_be_copied_and_saved(mechanism: Mechanism) -> None:
    inputs, causal = make_inputs(mechanism, 12), directions(mechanism)[0]
    want = mechanism(*inputs, causal=causal)
    assert torch.equal(copy.deepcopy(mechanism)(*inputs, causal=causal), want), "a deep copy differs"
    file = io.BytesIO()
    torch.save(mechanism.state_dict(), file)
    file.seek(0)
    loaded = copy.deepcopy(mechanism)
    for tensor in (*loaded.buffers(), *loaded.parameters()):
        tensor.detach().fill_(0.5)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(*inputs, causal=causal), want), "a saved and loaded copy differs"


def half_keeps_the_features(mechanism: Mechanism) -> None:
    """`.half()` and `.to(bfloat16)` change no random feature."""
    before = {name: b.clone() for name, b in mechanism.named_buffers()}
    for dtype in (torch.float16, torch.bfloat16):
        module = copy.deepcopy(mechanism).to(dtype)
        for name, buffer in module.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])


FORWARD_CHECKS: tuple[Check, ...] = (
    forward_equals_reference,
    masked_forward_equals_reference,
    gradients_equal_reference,
    cross_attention_equals_reference,
    unequal_causal_lengths_raise,
    what_is_not_supported_raises,
    attention_matrix_is_the_definition,
    padding_changes_nothing,
    rows_without_keys_are_zero,
    batches_are_independent,
    chunk_changes_speed_only,
    forward_is_a_function,
    layout_does_not_matter,
    outputs_are_convex_combinations,
    extreme_logits_are_right,
    lopsided_sizes_are_right,
    single_precision_is_single_precision,
    low_precision_is_as_good_as_it_can_be,
    modules_can_be_copied_and_saved,
    half_keeps_the_features,
)
CAUSAL_CHECKS: tuple[Check, ...] = (causal_means_causal,)
STATE_CHECKS: tuple[Check, ...] = (
    extend_equals_forward,
    masked_extend_equals_forward,
    states_are_values,
    state_does_not_grow,
    joined_states_go_on_alone,
)
SLOW_CHECKS: tuple[Check, ...] = (gradcheck,)
