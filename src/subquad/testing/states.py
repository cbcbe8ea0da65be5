"""Claims about `extend` and what it carries."""

import torch

from subquad.mechanism import Mechanism, reorder_state, state_bytes
from subquad.testing.inputs import assert_close, gradients, make_inputs, make_mask
from subquad.testing.judging import exact, extend_in_pieces, mask_kinds, poison_keys


def extend_equals_forward(mechanism: Mechanism) -> None:
    """Any split, forward and backward."""
    length = 37
    for splits in ([1] * length, [length], [1, length - 1], [20, 1, 1, 15], [7, 13, 17], [16, 21], [36, 1]):
        inputs = make_inputs(mechanism, length).leaves()
        want = mechanism(*inputs, causal=True)
        got, _ = extend_in_pieces(mechanism, inputs, splits, None)
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
            got, _ = extend_in_pieces(mechanism, poison_keys(inputs, mask), splits, mask)
            assert_close(got, want, exact(mechanism), f"{kind} padding, pieces {splits}")


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


def joined_states_go_on_alone(mechanism: Mechanism) -> None:
    """States of sequences at different positions become one, and no longer than the longest of them needs."""
    if not mechanism.supports_join:
        return
    lengths, more = (3, 260, 12), 25
    inputs = [make_inputs(mechanism, length + more, seed=length) for length in lengths]
    parts = []
    for number, (x, length) in enumerate(zip(inputs, lengths, strict=True)):  # in pieces that differ
        _, first = mechanism.extend(*x.tokens(0, length - number))
        parts.append(mechanism.extend(*x.tokens(length - number, length), first)[1] if number else first)
    state, at = mechanism.join_states(parts), 0
    for size in (1, 7, *[1] * (more - 8)):
        tokens = [x.tokens(length + at, length + at + size) for x, length in zip(inputs, lengths, strict=True)]
        q, k, v = (torch.cat(some) for some in zip(*tokens, strict=True))
        out, state = mechanism.extend(q, k, v, state)
        for number, some in enumerate(tokens):
            want, parts[number] = mechanism.extend(*some, parts[number])
            got = out[len(want) * number : len(want) * (number + 1)]
            assert_close(got, want, exact(mechanism), f"joined at {lengths[number]} tokens, {at} later")
        at += size
    rest = [row for row in range(len(state[0])) if row // len(parts[0][0]) != 1]
    kept = reorder_state(state, torch.tensor(rest))
    smaller = state_bytes(mechanism.join_states([kept])) < state_bytes(kept)
    assert smaller == mechanism.state_grows, "the state is as large as the sequence that was dropped"
