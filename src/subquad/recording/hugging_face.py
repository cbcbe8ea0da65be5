"""Calls of the attention of Hugging Face models, by the attention interface of transformers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad.checks import recording as checks
from subquad.recording.calls import Call, Layer, Observe

IMPLEMENTATION = "subquad_recording"  # our name among the attention functions of transformers


class _Recorder(NamedTuple):
    """What receives the calls. layers: of the model so far, in the order of their first calls."""

    names: dict[nn.Module, str]
    layers: dict[nn.Module, Layer]
    wanted: Callable[[Layer], bool]
    observe: Observe


# transformers keeps the functions that are registered forever: ours must not hold the model
_recorder: ContextVar[_Recorder] = ContextVar("_recorder")


@contextmanager
def observed_attention(model: Any, wanted: Callable[[Layer], bool], observe: Observe) -> Iterator[dict[Any, Layer]]:
    """While it lasts, exact attention that records its inputs is in the place of the model's own.

    Gives the layers, which fill up in the order of their first calls.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, given_mask)
    recorder = _Recorder({module: name for name, module in model.named_modules()}, {}, wanted, observe)
    token = _recorder.set(recorder)
    try:
        with implementation(model, IMPLEMENTATION):
            yield recorder.layers
    finally:
        _recorder.reset(token)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Another implementation of attention for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """q `[B, H, T, D]`, k, v `[B, K, T, D]`, mask `[B, T]`; the output `[B, T, H, D]`, and no weights."""
    names, layers, wanted, observe = _recorder.get()
    checks.whole_attention(names[module], q, k, mask, options)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(q, k, v, is_causal(module, options), None if mask is None else mask.bool(), scale)
    output = call.exact()
    layer = layers.setdefault(module, Layer(names[module], None))
    if wanted(layer):
        observe(layer, call.answered(output, exact=True))
    return output.transpose(1, 2), None


def is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    """What transformers passed to the attention function, or else the attribute of the module."""
    given = options.get("is_causal")
    return bool(module.is_causal if given is None else given)


def given_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Which tokens are real, as the user gave it; transformers would drop it for a function that it does not know."""
    return attention_mask
