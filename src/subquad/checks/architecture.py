"""Which class of transformers a folder was saved as, and what can be asked of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.errors import CheckpointError, ConfigError

OURS = ("subquad", "subquad_converted")


def saved_class(folder: str | Path, config: Any, library: Any) -> Any:
    """The class that a model was saved as; nothing but models of transformers, the `library`, is ever looked up."""
    name = next(iter(config.architectures or []), "")
    found = getattr(library, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedModel):
        raise CheckpointError(f"{folder}: its config.json names no class of transformers (architectures: {name!r})")
    return found


def exact_model(folder: Path, config: Any) -> None:
    if config.model_type in OURS:
        raise CheckpointError(
            f"{folder}: is a model of subquad already ({config.model_type}); give one of transformers"
        )


def trained_here(folder: Path, config: Any, command: str) -> None:
    """Not for models of transformers, converted or not."""
    if config.model_type != "subquad":
        raise CheckpointError(
            f"{folder}: is a {config.model_type!r} model; {command} takes models trained by subquad. In Python, "
            "subquad.calibrate fits a model of transformers whose attention was swapped"
        )


def one_sequence_of_tokens(folder: Path, kind: Any, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{folder}: {kind.__name__} is an encoder-decoder model; the command line runs models that read one "
            "sequence, such as Llama, GPT-2, BERT or ESM"
        )
    if kind.main_input_name != "input_ids":
        raise CheckpointError(
            f"{folder}: {kind.__name__} reads {kind.main_input_name}; the command line runs models that read tokens"
        )


def predicts_tokens(folder: Path, name: str, task: str | None) -> None:
    if task is None:
        raise ConfigError(
            f"{folder}: was saved as {name}, which predicts no tokens; score takes causal and masked language models, "
            "such as LlamaForCausalLM and BertForMaskedLM"
        )


def generates(folder: Path, name: str, task: str | None) -> None:
    if task != "causal":
        raise ConfigError(
            f"{folder}: was saved as {name}, which is no causal language model and cannot generate; give one such as "
            "LlamaForCausalLM"
        )


def keeps_states(folder: Path, found: Sequence[tuple[str, Any]]) -> None:
    """found: names and mechanisms of the layers of a converted model."""
    for name, mechanism in found:
        if not (mechanism.supports_causal and mechanism.supports_state):
            raise ConfigError(
                f"{folder}: {name} is {mechanism.name}, which has no state to go on from, so the model cannot "
                "generate; convert it with mechanisms that have one"
            )
