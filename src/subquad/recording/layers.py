"""Calls of our own mechanisms: their `forward` is replaced while a model is recorded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from subquad.mechanism import Mechanism, outermost
from subquad.recording.calls import Call, Layer, Observe

Forward = Callable[..., Tensor]


def own_layers(model: nn.Module, kinds: type | tuple[type, ...]) -> list[Layer]:
    """The mechanisms of these classes, in the order of the model's modules; parts of `mixed`, if it is none of them."""
    return [Layer(name or mechanism.name, mechanism) for name, mechanism in outermost(model, kinds)]


@contextmanager
def observed_layers(
    layers: Sequence[Layer], wanted: Callable[[Layer], bool], observe: Observe, *, exact: bool
) -> Iterator[None]:
    """While it lasts, `observe` is called with every call of the wanted layers.

    exact: all `layers` answer with exact attention, and what they would have answered is never computed.
    """
    with ExitStack() as stack:
        for layer in layers:
            if wanted(layer):
                stack.enter_context(_replaced_forward(layer, observe, exact))
            elif exact:
                stack.enter_context(_replaced_forward(layer, _ignore, exact))
        yield


def _ignore(layer: Layer, call: Call) -> None:
    """For layers that are not recorded."""


@contextmanager
def _replaced_forward(layer: Layer, observe: Observe, exact: bool) -> Iterator[None]:
    """An attribute of the module comes before the method of its class, and hooks of the module still run."""
    mechanism = layer.mechanism
    assert mechanism is not None
    attributes, original = vars(mechanism), mechanism.forward
    before = attributes.get("forward")  # another library's, which wraps modules in the same way
    attributes["forward"] = _observed(layer, mechanism, original, observe, exact)
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def _observed(layer: Layer, mechanism: Mechanism, original: Forward, observe: Observe, exact: bool) -> Forward:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        output = None
        if exact:
            mechanism.check_forward(q, k, v, causal, key_mask)  # as the layer itself does
        else:
            output = original(q, k, v, causal=causal, key_mask=key_mask, **options)
        scale, gaussian = _kernel(mechanism, q)
        given = {name: value for name, value in options.items() if value is not None}
        call = Call(q.detach(), k.detach(), v.detach(), causal, key_mask, scale, gaussian, given)
        output = call.exact() if output is None else output
        observe(layer, call.answered(output, exact=exact))
        return output

    return forward


def _kernel(mechanism: Mechanism, q: Tensor) -> tuple[float, bool]:
    """The scale of q.k, and whether the kernel is Gaussian; mechanisms keep them among their options or beside them."""
    options = getattr(mechanism, "options", None)
    scale = getattr(options, "scale", getattr(mechanism, "scale", None))
    return q.shape[-1] ** -0.5 if scale is None else scale, getattr(options, "gaussian", False)
