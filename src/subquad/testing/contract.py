"""The contract, one function per claim. Each takes a mechanism and raises AssertionError where the claim fails."""

import copy
import io
from collections.abc import Callable

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.mechanism import Mechanism, reorder_state, state_bytes
from subquad.testing.inputs import Inputs, assert_close, gradients, make_inputs, make_mask, relative_error

Check = Callable[[Mechanism], None]

LENGTHS = (1, 2, 3, 7, 8, 9, 31, 64, 65)
EXACT = 1e-10  # float64: the fast way and the definition differ by rounding only
SINGLE = 1e-5  # float32
EPSILON = torch.finfo(torch.float32).eps


def exact(mechanism: Mechanism, tolerance: float = EXACT) -> float:
    """What rounding may do. A mechanism that computes in float32, whatever it is given, says so by `rounding`."""
    return max(tolerance, getattr(mechanism, "rounding", 0.0))


def directions(mechanism: Mechanism) -> tuple[bool, ...]:
    return (False, True) if mechanism.supports_causal else (False,)


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
    if mechanism.positional:
        assert_raises(lambda: mechanism(*inputs), "needs as many queries as keys")
        return
    assert_close(mechanism(*inputs), mechanism.reference(*inputs), exact(mechanism), "9 queries, 21 keys")


def unequal_causal_lengths_raise(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 9, keys=21)
    assert_raises(lambda: mechanism(*inputs, causal=True), "causal")


def what_is_not_supported_raises(mechanism: Mechanism) -> None:
    """A mechanism that cannot be causal never pretends to be."""
    inputs = make_inputs(mechanism, 9)
    if not mechanism.supports_causal:
        assert_raises(lambda: mechanism(*inputs, causal=True), "causal")
        assert_raises(lambda: mechanism.attention_matrix(inputs.q, inputs.k, causal=True), "causal")
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


def mask_kinds(mechanism: Mechanism) -> tuple[str, ...]:
    return mechanism.mask_kinds


def padding_changes_nothing(mechanism: Mechanism) -> None:
    """A padded batch gives each sequence what it gets alone, forward and backward, whatever the padding holds."""
    for kind in mask_kinds(mechanism):
        length = 40
        mask = make_mask(length, kind)
        inputs = make_inputs(mechanism, length, batch=3)
        poisoned = _poison_keys(inputs, mask).leaves()
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


def _poison_keys(inputs: Inputs, mask: Tensor) -> Inputs:
    hidden = ~mask[:, None, :, None]
    return Inputs(inputs.q, inputs.k.masked_fill(hidden, torch.nan), inputs.v.masked_fill(hidden, torch.nan))


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
    """Whatever a token becomes, earlier outputs move by rounding only."""
    for dtype in (torch.float64, torch.float32):
        for length, token in ((9, 8), (40, 39), (40, 5), (40, 17)):
            inputs = make_inputs(mechanism, length).to(dtype)
            before = mechanism(*inputs, causal=True)[:, :, :token]
            for factor in (1e4, -1e4):
                changed = Inputs(*(t.clone() for t in inputs))
                for t in changed:
                    t[:, :, token] *= factor
                after = mechanism(*changed, causal=True)[:, :, :token]
                assert_close(after, before, 1e-6, f"{dtype}, length {length}, token {token} times {factor:g}")


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
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = make_inputs(mechanism, 20).to(dtype)
        copies = Inputs(*(t.clone() for t in inputs))
        generator = torch.random.get_rng_state()
        first, second = mechanism(*inputs), mechanism(*inputs)
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


# Numbers --------------------------------------------------------------------------------------------------------------


def outputs_are_convex_combinations(mechanism: Mechanism) -> None:
    if not mechanism.convex:
        return
    inputs = make_inputs(mechanism, 40, size=3.0)
    for causal in directions(mechanism):
        out = mechanism(*inputs, causal=causal)
        groups = out.shape[1] // inputs.v.shape[1]
        low, high = (bound(2).repeat_interleave(groups, 1)[:, :, None] for bound in (inputs.v.amin, inputs.v.amax))
        low, high = (torch.where(out == 0, out, bound) for bound in (low, high))  # rows without weight
        slack = exact(mechanism, 1e-12)
        assert bool(((out >= low - slack) & (out <= high + slack)).all()), "an output lies outside its values"


def extreme_logits_are_right(mechanism: Mechanism) -> None:
    """Logits up to 1e4 in size: float64 to 1e-8; float32 to twice what the definition in float32 loses, or twice
    what rounding q and k does to the exact result at worst (a logit of 1e4 rounds by 5e-4, whoever computes it)."""
    if not mechanism.convex:
        return
    for name, inputs in _extreme_inputs(mechanism).items():
        for causal in directions(mechanism):
            what = f"{name}, causal={causal}"
            leaves = inputs.leaves()
            got = mechanism(*leaves, causal=causal)
            for gradient in gradients(got, leaves):
                assert bool(gradient.isfinite().all()), f"{what}: gradient is not finite"
            if exact(mechanism) == EXACT:
                assert_close(got, mechanism.reference(*leaves, causal=causal), 1e-8, what)
                mask = torch.arange(40).expand(2, -1) < torch.tensor([[40], [23]])
                want = mechanism.reference(*inputs, causal=causal, key_mask=mask)
                assert_close(mechanism(*inputs, causal=causal, key_mask=mask), want, 1e-8, f"{what}, padded")
            single = inputs.to(torch.float32)
            want = mechanism.reference(*single.to(torch.float64), causal=causal)
            others = [single, *(_one_rounding_away(single, seed) for seed in range(8))]
            allowed = max(relative_error(mechanism.reference(*other, causal=causal), want) for other in others)
            assert_close(
                mechanism(*single, causal=causal), want, max(mechanism.float32_floor, 2 * allowed), f"{what}, float32"
            )


def lopsided_sizes_are_right(mechanism: Mechanism) -> None:
    """q times 300 and k over 300: the same logits, so float32 outputs, gradients and decoded tokens stay as good."""
    if not mechanism.convex or not mechanism.of_inner_products:
        return
    q, k, v = make_inputs(mechanism, 40)
    inputs = Inputs(300 * q, k / 300, v)
    for causal in directions(mechanism):
        single = inputs.to(torch.float32).leaves()
        exact = Inputs(*(t.detach().double() for t in single)).leaves()
        moved = _one_rounding_away(inputs.to(torch.float32)).leaves()
        naive = inputs.to(torch.float32).leaves()
        got, want = mechanism(*single, causal=causal), mechanism.reference(*exact, causal=causal)
        others = [mechanism.reference(*x, causal=causal) for x in (moved, naive)]
        allowed = max(SINGLE, *(2 * relative_error(other, want) for other in others))
        assert_close(got, want, allowed, f"causal={causal}")
        every = zip(
            "qkv",
            gradients(got, single),
            gradients(want, exact),
            gradients(others[0], moved),
            gradients(others[1], naive),
            strict=True,
        )
        for name, g, w, m, n in every:
            allowed = max(SINGLE, 2 * relative_error(m, w), 2 * relative_error(n, w))
            assert_close(g, w, allowed, f"gradient of {name}, causal={causal}")
        if causal and mechanism.supports_state:
            steps, _ = _extend(mechanism, inputs.to(torch.float32), [1] * 40, None)
            allowed = max(SINGLE, *(2 * relative_error(other, want) for other in others))
            assert_close(steps, want, allowed, "token by token")


def _one_rounding_away(inputs: Inputs, seed: int = 3) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def moved(t: Tensor) -> Tensor:
        signs = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return t.double() * (1 + EPSILON / 2 * signs)

    return Inputs(moved(inputs.q), moved(inputs.k), inputs.v.double())


def _extreme_inputs(mechanism: Mechanism) -> dict[str, Inputs]:
    """Sizes such that q.k / sqrt(D) reaches 1e4: everywhere, growing, falling, and in single tokens."""
    inputs = make_inputs(mechanism, 40)
    size = 100 * mechanism.head_dim**-0.25
    ramp = torch.linspace(0.01, 1, 40, dtype=torch.float64)[:, None]
    spikes = torch.full((40, 1), 0.01, dtype=torch.float64)
    spikes[::13] = 1
    cases = {"everywhere": torch.ones_like(ramp), "growing": ramp, "falling": ramp.flip(0), "spikes": spikes}
    return {name: Inputs(inputs.q * size * w, inputs.k * size * w, inputs.v) for name, w in cases.items()}


def single_precision_is_single_precision(mechanism: Mechanism) -> None:
    """float32 in, 1e-5 at most, outputs and gradients."""
    inputs = make_inputs(mechanism, 60).to(torch.float32)
    for causal in directions(mechanism):
        fast, exact = inputs.leaves(), inputs.to(torch.float64).leaves()
        got, want = mechanism(*fast, causal=causal), mechanism.reference(*exact, causal=causal)
        assert_close(got, want, SINGLE, f"causal={causal}")
        for name, g, w in zip("qkv", gradients(got, fast), gradients(want, exact), strict=True):
            assert_close(g, w, SINGLE, f"gradient of {name}, causal={causal}")


def low_precision_is_as_good_as_it_can_be(mechanism: Mechanism) -> None:
    """Half-precision outputs and gradients err at most twice as much as the definition in the same dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make_inputs(mechanism, 60, size=0.7).to(dtype)
        for causal in directions(mechanism):
            low, exact = inputs.leaves(), inputs.to(torch.float64).leaves()
            fast, naive = mechanism(*low, causal=causal), mechanism.reference(*low, causal=causal)
            want = mechanism.reference(*exact, causal=causal)
            _three_way(fast, naive, want, f"{dtype}, causal={causal}")
            every = zip("qkv", gradients(fast, low), gradients(naive, low), gradients(want, exact), strict=True)
            for name, f, n, w in every:
                _three_way(f, n, w, f"gradient of {name}, {dtype}, causal={causal}")


def _three_way(fast: Tensor, naive: Tensor, want: Tensor, what: str) -> None:
    assert bool(naive.isfinite().all()), f"{what}: the definition is not finite"
    allowed = 2 * relative_error(naive, want) + torch.finfo(fast.dtype).eps / 2  # storing the answer rounds it
    assert_close(fast, want, allowed, what)


# State ----------------------------------------------------------------------------------------------------------------


def extend_equals_forward(mechanism: Mechanism) -> None:
    """Any split, forward and backward."""
    length = 37
    for splits in ([1] * length, [length], [1, length - 1], [20, 1, 1, 15], [7, 13, 17], [16, 21], [36, 1]):
        inputs = make_inputs(mechanism, length).leaves()
        want = mechanism(*inputs, causal=True)
        got, _ = _extend(mechanism, inputs, splits, None)
        assert_close(got, want, exact(mechanism), f"pieces {splits}")
        for name, g, w in zip("qkv", gradients(got, inputs), gradients(want, inputs), strict=True):
            assert_close(g, w, exact(mechanism), f"gradient of {name}, pieces {splits}")


def masked_extend_equals_forward(mechanism: Mechanism) -> None:
    """Padded prompts of different lengths; pieces that are all padding for some sequence."""
    length = 37
    inputs = make_inputs(mechanism, length, batch=3)
    for kind in mask_kinds(mechanism):
        mask = make_mask(length, kind)
        want = mechanism(*inputs, causal=True, key_mask=mask)
        for splits in ([1] * length, [30, 1, 6], [9, 9, 9, 10]):
            got, _ = _extend(mechanism, _poison_keys(inputs, mask), splits, mask)
            assert_close(got, want, exact(mechanism), f"{kind} padding, pieces {splits}")


def _extend(mechanism: Mechanism, inputs: Inputs, splits: list[int], mask: Tensor | None) -> tuple[Tensor, tuple]:
    state, outs, start = None, [], 0
    for size in splits:
        stop = start + size
        piece = None if mask is None else mask[:, start:stop]
        out, state = mechanism.extend(*inputs.tokens(start, stop), state, key_mask=piece)
        outs.append(out)
        start = stop
    assert state is not None
    return torch.cat(outs, dim=2), state


def states_are_values(mechanism: Mechanism) -> None:
    """extend leaves the old state alone; states are NamedTuples, batch first, and can be reordered."""
    inputs = make_inputs(mechanism, 12, batch=3)
    _, state = mechanism.extend(*inputs.tokens(0, 8))
    copies = [t.clone() for t in state]
    out, after = mechanism.extend(*inputs.tokens(8, 12), state)
    assert all(torch.equal(a, b) for a, b in zip(state, copies, strict=True)), "extend changed the old state"
    assert hasattr(state, "_fields"), "a state must be a NamedTuple"
    assert all(t.shape[0] == 3 for t in after), "batch must come first in every tensor of a state"
    order = torch.tensor([2, 0, 0])
    swapped, _ = mechanism.extend(*(t[order] for t in inputs.tokens(8, 12)), state=reorder_state(state, order))
    assert_close(swapped, out[order], exact(mechanism, 1e-12), "a reordered state")


def state_does_not_grow(mechanism: Mechanism) -> None:
    """Constant bytes, whatever the length; the KV cache of exact attention is the exception."""
    inputs = make_inputs(mechanism, 300)
    sizes = []
    for length in (10, 300):
        _, state = mechanism.extend(*inputs.tokens(0, length))
        sizes.append(state_bytes(state))
    if mechanism.state_grows:
        assert sizes[1] > sizes[0]
    else:
        assert sizes[0] == sizes[1], f"state grew from {sizes[0]} to {sizes[1]} bytes"


# Modules --------------------------------------------------------------------------------------------------------------


def modules_can_be_copied_and_saved(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, 12)
    want = mechanism(*inputs)
    assert torch.equal(copy.deepcopy(mechanism)(*inputs), want), "a deep copy differs"
    file = io.BytesIO()
    torch.save(mechanism.state_dict(), file)
    file.seek(0)
    loaded = copy.deepcopy(mechanism)
    for tensor in (*loaded.buffers(), *loaded.parameters()):
        tensor.detach().fill_(0.5)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(*inputs), want), "a saved and loaded copy differs"


def half_keeps_the_features(mechanism: Mechanism) -> None:
    """`.half()` and `.to(bfloat16)` change no random feature."""
    before = {name: b.clone() for name, b in mechanism.named_buffers()}
    for dtype in (torch.float16, torch.bfloat16):
        module = copy.deepcopy(mechanism).to(dtype)
        for name, buffer in module.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])


def assert_raises(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except SubquadError as error:
        assert words in str(error), f"the error does not say {words!r}: {error}"  # noqa: PT017 - works without pytest
    else:
        raise AssertionError(f"no error that says {words!r}")


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
)
SLOW_CHECKS: tuple[Check, ...] = (gradcheck,)
