"""What attends in the layers of a model whose attention was swapped, in words."""

from itertools import groupby
from typing import Any


def layers_in_words(config: Any) -> str:
    """A line for layers that are alike, with the key heads of each mechanism where they differ.

    config: of a swapped model.

    Example:
        >>> from types import SimpleNamespace
        >>> parts = [{"attention": "favor", "heads": [0, 2]}, {"attention": "softmax", "heads": [1]}]
        >>> layers = {"attention": ["favor", "favor", "mixed", "favor"]}
        >>> print(layers_in_words(SimpleNamespace(**layers, attention_options=[{}, {}, {"parts": parts}, {}])))
        mechanisms:
          layers 0-1, 3: favor
          layer 2: mixed, favor on key heads 0, 2; softmax on key head 1
    """
    found: dict[str, list[int]] = {}
    for layer, (name, options) in enumerate(zip(config.attention, config.attention_options, strict=True)):
        parts = [f"{part['attention']} on key {_numbers('head', part['heads'])}" for part in options.get("parts", ())]
        found.setdefault(f"{name}, {'; '.join(parts)}" if parts else name, []).append(layer)
    return "\n".join(["mechanisms:", *(f"  {_numbers('layer', layers)}: {words}" for words, layers in found.items())])


def _numbers(what: str, numbers: list[int]) -> str:
    """In the plural if there are several, and neighbours as one stretch."""
    stretches = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        stretches.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(stretches)}"
