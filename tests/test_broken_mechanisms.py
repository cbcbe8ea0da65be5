"""The contract notices what it is there for."""

from typing import Any

import pytest
from torch import Tensor

from subquad import SoftmaxAttention
from subquad.testing import check_mechanism, checks_for
from subquad.testing.contract import gradcheck


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
