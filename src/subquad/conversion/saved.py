"""Swapped models on disk, which come back as they were.

`save_pretrained` of a swapped model writes a `ConvertedConfig` around the configuration of transformers. Its
`model_type` is unknown to transformers alone, which refuses the folder instead of loading the exact model. `load`, and
the Auto classes after `import subquad.conversion`, build the model of transformers, swap its attention as it was
swapped, and load all weights.
"""

import functools
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from subquad.checks import conversion as checks
from subquad.checks.architecture import saved_class
from subquad.conversion.generation import CHILD
from subquad.conversion.swap import swap_attention

AUTO_CLASSES = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


HINT = "unknown: this model has another attention; load it with subquad.load"


class ConvertedConfig(PreTrainedConfig):
    """Of a saved model with another attention.

    Args:
        base_type, base: `model_type` and configuration of the model of transformers. They are apart because
            transformers looks for its own `model_type` in every dict of a config.json, and would load the exact model.
        vocab_size, hidden_size: no numbers. A class of transformers that is asked for the folder directly complains of
            them, instead of building a model of its default sizes.
        attention, attention_options: lists with the name and the options of each layer's mechanism.
    """

    model_type = "subquad_converted"

    vocab_size: str = HINT
    hidden_size: str = HINT
    base_type: str | None = None
    base: dict[str, Any] | None = None
    attention: Any = None
    attention_options: Any = None

    def base_config(self) -> PreTrainedConfig:
        """The configuration of the model before its attention was swapped."""
        base_type, base = checks.base_of_converted(self.base_type, self.base)
        return type(AutoConfig.for_model(base_type)).from_dict(base)


class _Swapped(PreTrainedConfig):
    """What the configuration of a swapped model becomes: the same values, and the mechanisms of its layers."""

    attention: list[str]
    attention_options: list[dict[str, Any]]

    def layer_attention(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of a layer's mechanism; `subquad.calibrate` notes there what it has found."""
        return self.attention[layer], dict(self.attention_options[layer])

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        base = self.to_dict()
        mechanisms = {name: base.pop(name) for name in ("attention", "attention_options")}
        base_type = base.pop("model_type")
        config = ConvertedConfig(base_type=base_type, base=base, architectures=self.architectures, **mechanisms)
        config.save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def __reduce__(self) -> Any:
        return _restored, (type(self).__mro__[2], self.__dict__)


@functools.cache
def _swapped(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    return type(kind.__name__, (_Swapped, kind), {})


def _restored(kind: type[PreTrainedConfig], values: dict[str, Any]) -> PreTrainedConfig:
    config = object.__new__(_swapped(kind))
    config.__dict__.update(values)
    return config


def remember(model: Any, attention: list[str], options: list[dict[str, Any]]) -> None:
    """Writes into the configuration of a model what its layers are."""
    config = model.config
    if not isinstance(config, _Swapped):
        config.__class__ = _swapped(type(config))
    config.attention, config.attention_options = attention, options


def is_swapped(config: Any) -> bool:
    """Whether it is the configuration of a model whose attention was swapped."""
    return isinstance(config, _Swapped)


def load(folder: str | Path, **options: Any) -> Any:
    """A model whose attention was swapped, as it was when `save_pretrained` wrote it.

    Args:
        folder: of the model.
        options: of transformers' `from_pretrained`, such as `dtype`.
    Returns:
        The model of transformers (`LlamaForCausalLM`, ...), in evaluation mode, with its mechanisms and their features.
        With `output_loading_info=True` also which weights were missing or left over, as `from_pretrained` gives it.
    """
    checks.converted_folder(folder)
    config = ConvertedConfig.from_pretrained(folder, trust_remote_code=False)
    return _load(folder, saved_class(folder, config, transformers), config, options)


def _load(folder: str | Path, kind: type[PreTrainedModel], config: ConvertedConfig, options: dict[str, Any]) -> Any:
    def initialise(self: Any, base: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, base, *args, **kwargs)
        swap_attention(self, config.attention, layer_options=config.attention_options)

    # features stay in full precision in a model of half of it, as they were when it was converted
    precise = {"_keep_in_fp32_modules_strict": {*(kind._keep_in_fp32_modules_strict or ()), CHILD}}
    made: Any = type(kind.__name__, (kind,), {"__init__": initialise, **precise})
    options.pop("trust_remote_code", None)  # whatever it says: nothing in the folder is run
    found = made.from_pretrained(folder, config=config.base_config(), trust_remote_code=False, **options)
    model = found[0] if isinstance(found, tuple) else found
    model.__class__ = kind
    return found


class _Loader:
    """Stands for all converted models in one of the Auto classes."""

    config_class = ConvertedConfig
    auto_class: Any

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: ConvertedConfig, **options: Any) -> Any:
        kind = checks.head_of(cls.auto_class, type(base := config.base_config()), base.model_type)
        return _load(folder, kind, config, options)


def register() -> None:
    """Tells the Auto classes of converted models."""
    AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig, exist_ok=True)
    for auto in AUTO_CLASSES:
        auto.register(
            ConvertedConfig, type(f"Converted{auto.__name__}", (_Loader,), {"auto_class": auto}), exist_ok=True
        )


register()
