"""The contract suite, for your own mechanism as well as ours.

    from subquad.testing import check_mechanism
    check_mechanism(MyAttention(head_dim=8))

or, one test per claim and mechanism:

    @parametrize_contract({"mine": lambda: MyAttention(head_dim=8)})
    def test_contract(mechanism, check):
        check(mechanism)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from subquad.mechanism import Mechanism
from subquad.testing.contract import CAUSAL_CHECKS, FORWARD_CHECKS, SLOW_CHECKS, STATE_CHECKS
from subquad.testing.inputs import assert_close, make_inputs, relative_error
from subquad.testing.judging import EXACT, Check, exact

if TYPE_CHECKING:
    import pytest

__all__ = [
    "Check",
    "assert_close",
    "check_mechanism",
    "checks_for",
    "make_inputs",
    "parametrize_contract",
    "relative_error",
]


def checks_for(mechanism: Mechanism, *, slow: bool = False) -> tuple[Check, ...]:
    """The claims this mechanism makes."""
    return (
        *FORWARD_CHECKS,
        *(CAUSAL_CHECKS if mechanism.supports_causal else ()),
        *(STATE_CHECKS if mechanism.supports_state else ()),
        *(SLOW_CHECKS if slow and exact(mechanism) == EXACT else ()),  # gradcheck needs all digits of float64
    )


def check_mechanism(mechanism: Mechanism, *, slow: bool = False) -> None:
    """Raises AssertionError, naming the claim, where `mechanism` breaks the contract."""
    check = None
    try:
        for check in checks_for(mechanism, slow=slow):
            check(mechanism)
    except Exception as error:
        raise AssertionError(f"{mechanism.name}, {getattr(check, '__name__', check)}: {error}") from error


def parametrize_contract(makers: Mapping[str, Callable[[], Mechanism]]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over (mechanism, check), with readable ids; slow checks carry the mark `full`."""
    import pytest

    cases = []
    for name, make in makers.items():
        mechanism = make()
        for check in checks_for(mechanism, slow=True):
            marks = [pytest.mark.full] if check in SLOW_CHECKS else []
            cases.append(pytest.param(mechanism, check, id=f"{name}-{check.__name__}", marks=marks))
    return pytest.mark.parametrize(("mechanism", "check"), cases)
