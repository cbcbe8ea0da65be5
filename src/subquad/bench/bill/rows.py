"""What a converted model is compared with: itself without a part of its attention, and controls."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from subquad.conversion.generation import CHILD
from subquad.conversion.swap import attention_modules, mechanisms_in_place, mechanisms_of, without_mechanisms
from subquad.diagnostics.far_field import without_far_field
from subquad.mechanism import Mechanism
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention

EXACT, CONVERTED, NO_FAR, FAR_ALONE = "exact", "converted", "far fields off", "far fields alone"
WINDOW, NOTHING = "window of equal memory", "no attention"
SINKS = 4  # of the window


@contextmanager
def _converted(model: Any, window: int) -> Iterator[None]:
    yield


@contextmanager
def _exact(model: Any, window: int) -> Iterator[None]:
    with without_mechanisms(model):
        yield


@contextmanager
def _no_far(model: Any, window: int) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in far_fields(model):
            stack.enter_context(without_far_field(layer))
        yield


@contextmanager
def _far_alone(model: Any, window: int) -> Iterator[None]:
    """Heads that have features keep these alone; the others have no attention."""
    layers = range(len(attention_modules(model)))
    attention, options = zip(*(_without_near(*model.config.layer_attention(layer)) for layer in layers), strict=True)
    made = mechanisms_of(model, attention, options)
    for mechanism, (_, module) in zip(made, attention_modules(model), strict=True):
        for new, old in zip(_parts(mechanism), _parts(getattr(module, CHILD)), strict=True):
            if isinstance(new, FavorAttention) and isinstance(old, FavorAttention):
                _give_features(new, old)
    with _replaced(model, made):
        yield


def _give_features(new: FavorAttention, old: FavorAttention) -> None:
    """All but what weighs features against near keys: there are none."""
    names = new.features.state_dict()
    new.features.load_state_dict({name: x for name, x in old.features.state_dict().items() if name in names})


def _without_near(attention: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if attention == "mixed":
        parts = []
        for part in options["parts"]:
            given = {key: value for key, value in part.items() if key not in ("attention", "heads")}
            name, given = _without_near(part["attention"], given)
            parts.append({"attention": name, "heads": part["heads"], **given})
        return "mixed", {"parts": parts}
    if attention != "favor":
        return "identity", {}
    return "favor", {key: value for key, value in options.items() if key != "reach"} | {"near": 0, "sinks": 0}


@contextmanager
def _window(model: Any, window: int) -> Iterator[None]:
    with _everywhere(model, "window", window=window, global_tokens=SINKS):
        yield


@contextmanager
def _nothing(model: Any, window: int) -> Iterator[None]:
    with _everywhere(model, "identity"):
        yield


def _everywhere(model: Any, attention: str, **options: Any) -> AbstractContextManager[None]:
    layers = len(attention_modules(model))
    return _replaced(model, mechanisms_of(model, [attention] * layers, [options] * layers))


@contextmanager
def _replaced(model: Any, mechanisms: list[Mechanism]) -> Iterator[None]:
    with without_mechanisms(model), mechanisms_in_place(model, mechanisms):
        yield


ROWS: dict[str, Callable[[Any, int], AbstractContextManager[None]]] = {
    EXACT: _exact,
    CONVERTED: _converted,
    NO_FAR: _no_far,
    FAR_ALONE: _far_alone,
    WINDOW: _window,
    NOTHING: _nothing,
}


def has_parts(model: Any, row: str) -> bool:
    """Whether the model has what the row is about: far fields, and something beside them."""
    if row == FAR_ALONE:
        return any(isinstance(module, FavorAttention) for module in model.modules())
    return row != NO_FAR or bool(far_fields(model))


def far_fields(model: Any) -> list[FavorAttention]:
    """Layers that have something beside it, and do without."""
    favor = [module for module in model.modules() if isinstance(module, FavorAttention)]
    return [layer for layer in favor if layer.options.near or layer.options.sinks]


def _parts(mechanism: Mechanism) -> list[Mechanism]:
    return mechanism.mechanisms() if isinstance(mechanism, MixedAttention) else [mechanism]
