"""What the claims of the contract have in common: tolerances, which directions and masks apply, running a state."""

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.mechanism import Mechanism
from subquad.testing.inputs import Inputs

Check = Callable[[Mechanism], None]

EXACT = 1e-10  # float64: the fast way and the definition differ by rounding only
SINGLE = 1e-5  # float32
EPSILON = torch.finfo(torch.float32).eps


def exact(mechanism: Mechanism, tolerance: float = EXACT) -> float:
    """What rounding may do. A mechanism that computes in float32, whatever it is given, says so by `rounding`."""
    return max(tolerance, getattr(mechanism, "rounding", 0.0))


def directions(mechanism: Mechanism) -> tuple[bool, ...]:
    """Whether calls may be causal, in the order in which they are tried."""
    return (*((False,) if mechanism.supports_bidirectional else ()), *((True,) if mechanism.supports_causal else ()))


def mask_kinds(mechanism: Mechanism) -> tuple[str, ...]:
    return mechanism.mask_kinds


def poison_keys(inputs: Inputs, mask: Tensor) -> Inputs:
    hidden = ~mask[:, None, :, None]
    return Inputs(inputs.q, inputs.k.masked_fill(hidden, torch.nan), inputs.v.masked_fill(hidden, torch.nan))


def extend_in_pieces(
    mechanism: Mechanism, inputs: Inputs, splits: list[int], mask: Tensor | None
) -> tuple[Tensor, tuple]:
    state, outs, start = None, [], 0
    for size in splits:
        stop = start + size
        piece = None if mask is None else mask[:, start:stop]
        out, state = mechanism.extend(*inputs.tokens(start, stop), state, key_mask=piece)
        outs.append(out)
        start = stop
    assert state is not None
    return torch.cat(outs, dim=2), state


def assert_raises(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except SubquadError as error:
        assert words in str(error), f"the error does not say {words!r}: {error}"  # noqa: PT017 - works without pytest
    else:
        raise AssertionError(f"no error that says {words!r}")
