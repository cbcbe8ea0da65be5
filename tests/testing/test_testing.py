"""The contract notices what it is there for: each claim has a mechanism that breaks it and nothing else."""

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad import SoftmaxAttention
from subquad.mechanism import State, repeat_heads
from subquad.mechanisms.softmax import SoftmaxState
from subquad.testing import check_mechanism, checks_for, contract, numbers, states
from subquad.testing.contract import gradcheck
from subquad.testing.judging import Check

CASES = Path(__file__).parent / "contract_cases.txt"


class WrongGradient(SoftmaxAttention):
    def forward(self, *args: Any, **options: Any) -> Tensor:
        out = super().forward(*args, **options)
        return out + 0.01 * (out - out.detach())  # nothing, but for the gradient


def test_a_gradient_that_is_off_by_one_percent() -> None:
    gradcheck(SoftmaxAttention(2))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(WrongGradient(2))
    with pytest.raises(AssertionError, match=r"^softmax, gradients_equal_reference: gradient of q, "):
        check_mechanism(WrongGradient(2))


def test_gradcheck_is_slow_and_must_be_asked_for() -> None:
    assert gradcheck not in checks_for(SoftmaxAttention(2))
    assert gradcheck in checks_for(SoftmaxAttention(2), slow=True)


# One claim each -------------------------------------------------------------------------------------------------------


class Off(SoftmaxAttention):
    """Exact attention whose output `change(out, q, k, v, causal, key_mask)` makes another."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__(3)
        self.change = change

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        out = super().forward(q, k, v, causal=causal, key_mask=key_mask)
        return self.change(out, q, k, v, causal, key_mask)


class OffState(SoftmaxAttention):
    """`change(out, state, past, q, key_mask)` makes another output and state."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__(3)
        self.change = change

    def extend(self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, *, key_mask: Tensor | None = None) -> Any:
        kept = state[:3] if state is not None and len(state) == 4 else state
        kept = None if kept is None else type(super().extend(q, k, v)[1])(*kept)
        out, after = super().extend(q, k, v, kept, key_mask=key_mask)
        return self.change(out, after, state, q, key_mask)


class OffMatrix(SoftmaxAttention):
    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__(3)
        self.change = change

    def attention_matrix(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        return self.change(super().attention_matrix(q, k, **options), **options)


class Accepts(SoftmaxAttention):
    """What it says it does not support, it does."""

    def __init__(self, **claims: Any) -> None:
        super().__init__(3)
        for name, value in claims.items():
            setattr(self, name, value)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        scores = q @ repeat_heads(k, q.shape[1]).mT
        return (scores.tril() if causal else scores).softmax(-1) @ repeat_heads(v, q.shape[1])

    def attention_matrix(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        return (q @ repeat_heads(k, q.shape[1]).mT).softmax(-1)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return self(q, k, v), (k, v)


class Positional(Accepts):
    @property
    def positional(self) -> bool:
        return True


class Loses(SoftmaxAttention):
    """A number that `state_dict` does not have, or that `.half()` rounds."""

    factor: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__(3)
        self.register_buffer("factor", torch.tensor([1.1]), persistent=persistent)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return super().forward(*args, **options) * self.factor.to(args[0].dtype)


class NoCopy(SoftmaxAttention):
    copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "NoCopy":
        other = NoCopy(3)
        other.copied = True
        return other

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return super().forward(*args, **options) * (1.5 if self.copied else 1.0)


class Chunked(SoftmaxAttention):
    chunk: int | None = None

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3)
        self.change = change

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out = super().forward(*args, **options)
        return out if self.chunk is None else self.change(out)


class Growing(SoftmaxAttention):
    state_grows = False


def leak(out: Tensor, _q: Tensor, _k: Tensor, v: Tensor, causal: bool, _mask: Tensor | None) -> Tensor:
    return out + 1e-3 * v[:, :1].mean(2, keepdim=True) if causal else out


def touch(out: Tensor, q: Tensor, *_: Any) -> Tensor:
    with torch.no_grad():
        q += 0 if q.requires_grad else 1
    return out


def draws(out: Tensor, *_: Any) -> Tensor:
    torch.rand(1)
    return out


def noisy(out: Tensor, *_: Any) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return out + torch.rand(1, generator=generator).to(out.dtype)


def on(condition: Callable[..., Any], factor: float = 1 + 1e-6) -> Callable[..., Tensor]:
    def change(out: Tensor, *seen: Any) -> Tensor:
        return out * factor if condition(*seen) else out

    return change


def keep_in_place(out: Tensor, after: Any, past: Any, *_: Any) -> Any:
    if past is not None:
        past.v[:] += 1
    return out, after


def batch_last(out: Tensor, after: Any, *_: Any) -> Any:
    return out, after._replace(mask=after.mask.T)


class Forgets(SoftmaxAttention):
    """Joined states lose what only longer sequences have."""

    def join_states(self, states: Sequence[State]) -> Any:
        shortest = min(state[2].shape[1] for state in states)
        cut = (SoftmaxState(*(x.narrow(-1 if x.dim() == 2 else 2, -shortest, shortest) for x in s)) for s in states)
        return super().join_states(list(cut))


class KeepsPadding(SoftmaxAttention):
    def join_states(self, states: Sequence[State]) -> Any:
        return super().join_states(states) if len(states) > 1 else states[0]


def no_gradient_of_rest(out: Tensor) -> Tensor:
    return torch.cat([out[..., :1], out[..., 1:].detach()], -1)


def zero_rows(q: Tensor, mask: Tensor | None) -> Any:
    return mask is not None and not bool(mask[1].any()) and q.shape[0] == 2


def ones_without_keys(out: Tensor, q: Tensor, *seen: Any) -> Tensor:
    return torch.where(torch.arange(2)[:, None, None, None] == 1, 1.0, out) if zero_rows(q, seen[-1]) else out


def infinite_gradient(out: Tensor, q: Tensor, _k: Tensor, v: Tensor, _causal: bool, mask: Tensor | None) -> Tensor:
    return out + (0 * v[:, :1].sum()).abs().sqrt() if zero_rows(q, mask) else out


def gradient_without_keys(out: Tensor, q: Tensor, *seen: Any) -> Tensor:
    return out + (q - q.detach()).sum(-1, keepdim=True) if zero_rows(q, seen[-1]) else out


def looks_ahead(matrix: Tensor, causal: bool = False, rows: Tensor | None = None, **_: Any) -> Tensor:
    ahead = torch.diag_embed(torch.full((matrix.shape[-1] - 1,), 1e-3, dtype=matrix.dtype), 1)
    return matrix + (ahead if rows is None else ahead[rows]) if causal else matrix


def is_long(q: Tensor, *_: Any) -> bool:
    return q.shape[2] == 65


def is_masked(*seen: Any) -> bool:
    return seen[-1] is not None and seen[-1].shape[1] == 40


BROKEN: dict[str, tuple[Check, Callable[[], SoftmaxAttention], str | None]] = {
    "long": (contract.forward_equals_reference, lambda: Off(on(is_long)), "length 65, causal=False"),
    "causal": (
        contract.forward_equals_reference,
        lambda: Off(on(lambda _q, _k, _v, causal, _mask: causal)),
        "length 1, causal=True",
    ),
    "masked": (contract.masked_forward_equals_reference, lambda: Off(on(is_masked)), "length 40, right padding"),
    "crosswise": (
        contract.cross_attention_equals_reference,
        lambda: Off(on(lambda q, k, *_: q.shape[2] != k.shape[2])),
        "9 queries, 21 keys",
    ),
    "positions crosswise": (
        contract.cross_attention_equals_reference,
        Positional,
        "no error that says 'needs as many queries as keys'",
    ),
    "other lengths": (contract.unequal_causal_lengths_raise, Accepts, "no error that says 'causal'"),
    "causal all the same": (
        contract.what_is_not_supported_raises,
        lambda: Accepts(supports_causal=False),
        "no error that says 'causal'",
    ),
    "bidirectional all the same": (
        contract.what_is_not_supported_raises,
        lambda: Accepts(supports_bidirectional=False),
        "no error that says 'causal'",
    ),
    "a state all the same": (
        contract.what_is_not_supported_raises,
        lambda: Accepts(supports_state=False),
        "no error that says 'extend'",
    ),
    "other rows": (
        contract.attention_matrix_is_the_definition,
        lambda: OffMatrix(lambda matrix, rows=None, **_: matrix if rows is None else matrix.flip(-1)),
        "rows of the matrix",
    ),
    "a matrix that looks ahead": (
        contract.attention_matrix_is_the_definition,
        lambda: OffMatrix(looks_ahead),
        "the causal matrix looks ahead",
    ),
    "rows above 1": (
        contract.attention_matrix_is_the_definition,
        lambda: OffMatrix(lambda matrix, **_: matrix * (1 + 1e-8)),
        "rows do not sum to 1",
    ),
    "padding counts": (
        contract.padding_changes_nothing,
        lambda: Off(lambda out, *seen: out if seen[4] is None else out * (1 + 1e-6 * (~seen[4]).sum())),
        "right padding, sequence 0, causal=False",
    ),
    "something from nothing": (
        contract.rows_without_keys_are_zero,
        lambda: Off(ones_without_keys),
        "causal=False: a sequence without keys must give zeros",
    ),
    "infinite gradients": (contract.rows_without_keys_are_zero, lambda: Off(infinite_gradient), "of v is not finite"),
    "gradients from nothing": (
        contract.rows_without_keys_are_zero,
        lambda: Off(gradient_without_keys),
        "gradient of q reaches a sequence without keys",
    ),
    "a leak": (contract.causal_means_causal, lambda: Off(leak), "length 9, token 8 of size 10000"),
    "batches meet": (
        contract.batches_are_independent,
        lambda: Off(lambda out, *_: out + 1e-9 * out.mean(0, keepdim=True)),
        "sequence 0, causal=False",
    ),
    "chunks": (contract.chunk_changes_speed_only, lambda: Chunked(lambda out: out * (1 + 1e-6)), "chunk 1, causal=Fal"),
    "chunks' gradients": (
        contract.chunk_changes_speed_only,
        lambda: Chunked(no_gradient_of_rest),
        "gradient of q, chunk 1, causal=False",
    ),
    "noise": (contract.forward_is_a_function, lambda: Off(noisy), "two calls differ"),
    "random numbers": (contract.forward_is_a_function, lambda: Off(draws), "forward drew random numbers"),
    "changed inputs": (contract.forward_is_a_function, lambda: Off(touch), "two calls differ|changed its inputs"),
    "another dtype": (contract.forward_is_a_function, lambda: Off(lambda out, *_: out.float()), None),
    "layouts": (
        contract.layout_does_not_matter,
        lambda: Off(on(lambda q, *_: not q.is_contiguous())),
        "non-contiguous inputs, causal=False",
    ),
    "copies": (contract.modules_can_be_copied_and_saved, lambda: NoCopy(3), "a deep copy differs"),
    "saved": (
        contract.modules_can_be_copied_and_saved,
        lambda: Loses(persistent=False),
        "a saved and loaded copy differs",
    ),
    "half": (contract.half_keeps_the_features, lambda: Loses(persistent=True), None),
    "outside of the values": (
        numbers.outputs_are_convex_combinations,
        lambda: Off(lambda out, *_: out * 3),
        "an output lies outside its values",
    ),
    "extreme": (
        numbers.extreme_logits_are_right,
        lambda: Off(on(lambda q, *_: float(q.detach().abs().max()) > 100)),
        "everywhere, causal=False",
    ),
    "extreme gradients": (
        numbers.extreme_logits_are_right,
        lambda: Off(lambda out, q, *_: out + (0 * q.sum()).abs().sqrt()),
        "everywhere, causal=False: gradient is not finite",
    ),
    "lopsided": (
        numbers.lopsided_sizes_are_right,
        lambda: Off(on(lambda q, *_: float(q.detach().abs().max()) > 300, 1.001)),
        "causal=False",
    ),
    "single": (
        numbers.single_precision_is_single_precision,
        lambda: Off(on(lambda q, *_: q.dtype == torch.float32, 1 + 1e-4)),
        "causal=False",
    ),
    "single gradients": (
        numbers.single_precision_is_single_precision,
        lambda: Off(lambda out, *_: out + 1e-3 * (out - out.detach())),
        "gradient of q, causal=False",
    ),
    "half precision": (
        numbers.low_precision_is_as_good_as_it_can_be,
        lambda: Off(on(lambda q, *_: q.dtype == torch.bfloat16, 1.1)),
        "bfloat16, causal=False",
    ),
    "half gradients": (
        numbers.low_precision_is_as_good_as_it_can_be,
        lambda: Off(lambda out, *_: out + 0.2 * (out - out.detach())),
        "gradient of q, torch.bfloat16, causal=False",
    ),
    "pieces": (
        states.extend_equals_forward,
        lambda: OffState(lambda out, after, _past, q, _mask: (out * (1 + 1e-6 * (q.shape[2] == 21)), after)),
        r"pieces \[16, 21\]",
    ),
    "gradients of pieces": (
        states.extend_equals_forward,
        lambda: OffState(lambda out, after, *_: (out + 0.1 * (out - out.detach()), after)),
        "gradient of q, pieces",
    ),
    "masked pieces": (
        states.masked_extend_equals_forward,
        lambda: OffState(lambda out, after, _past, _q, mask: (out if mask is None else out * (1 + 1e-6), after)),
        "right padding, pieces",
    ),
    "a changed state": (states.states_are_values, lambda: OffState(keep_in_place), "extend changed the old state"),
    "a plain tuple": (
        states.states_are_values,
        lambda: OffState(lambda out, after, *_: (out, (*after, after[2]))),
        "a state must be a NamedTuple",
    ),
    "a batch elsewhere": (
        states.states_are_values,
        lambda: OffState(lambda out, after, past, *_: batch_last(out, after) if past is not None else (out, after)),
        "batch must come first",
    ),
    "what longer ones had": (states.joined_states_go_on_alone, lambda: Forgets(3), "joined at 260 tokens, 0 later"),
    "padding of what was dropped": (
        states.joined_states_go_on_alone,
        lambda: KeepsPadding(3),
        "the state is as large as the sequence that was dropped",
    ),
    "a growing state": (states.state_does_not_grow, lambda: Growing(3), "state grew from"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_noticed(name: str) -> None:
    check, make, words = BROKEN[name]
    with pytest.raises(AssertionError, match=words):
        check(make())


# What the contract looks at -------------------------------------------------------------------------------------------


class Spy(SoftmaxAttention):
    """Remembers its calls: their sizes, dtypes, options, and something that changes when a number does."""

    chunk: int | None = None

    def __init__(self) -> None:
        super().__init__(3)
        self.calls: list[str] = []

    def note(self, what: str, q: Tensor, k: Tensor, v: Tensor | None, **options: Any) -> None:
        shown = [what, str(q.dtype)[6:], *(str(list(t.shape)) for t in (q, k))]
        shown += [f"{float(t.detach().double().nan_to_num().norm()):.4g}" for t in (q, k, v) if t is not None]
        for name, option in options.items():
            if option is not None and option is not False:
                shown.append(f"{name}={option.long().sum(-1).tolist()}" if isinstance(option, Tensor) else name)
        self.calls.append(" ".join([*shown, *([f"chunk={self.chunk}"] if self.chunk else [])]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.note("forward", q, k, v, **options)
        return super().forward(q, k, v, **options)

    def attention_matrix(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        self.note("matrix", q, k, None, **options)
        return super().attention_matrix(q, k, **options)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, **options: Any) -> Any:
        self.note("extend", q, k, v, state=state is not None, **options)
        return super().extend(q, k, v, state, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spy":
        other = Spy()
        other.calls = self.calls
        return other


def cases() -> Iterator[str]:
    """Every check, and the calls that it makes."""
    for check in checks_for(SoftmaxAttention(3), slow=True):
        if check is gradcheck:
            continue  # hundreds of calls, made by torch
        spy = Spy()
        check(spy)
        yield check.__name__
        yield from (f"  {call}" for call in dict.fromkeys(spy.calls))


def test_its_cases_are_frozen() -> None:
    """Fewer lengths, other masks or smaller numbers would weaken it, and nobody would see. Other torch, other draws:
    `python tests/testing/test_testing.py` writes the file anew."""
    assert list(cases()) == CASES.read_text().splitlines()


def test_a_copy_of_the_spy_reports_to_the_spy() -> None:
    spy = Spy()
    copy.deepcopy(spy)(*torch.randn(3, 1, 1, 2, 3))
    assert len(spy.calls) == 1


if __name__ == "__main__":
    CASES.write_text("\n".join(cases()) + "\n")
