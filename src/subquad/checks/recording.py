"""Checks of `subquad.recording`: batches, models whose attention can be recorded, calls of Hugging Face models."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from subquad.checks.models import one_sequence_a_row
from subquad.errors import ConfigError, DtypeError


def batches(op: str, given: Any) -> list[Any]:
    """At least one; a tensor or mapping alone is a common slip."""
    if isinstance(given, (Tensor, Mapping)) or not isinstance(given, Iterable):
        raise DtypeError(f"{op}: batches must be a list of batches, got {type(given).__name__}; use [batch]")
    found = list(given)
    if not found:
        raise ConfigError(f"{op}: there are no batches; a few thousand tokens do")
    return found


def memory(op: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise ConfigError(f"{op}: memory must be a number of bytes above 0, got {given!r}")
    return given


def can_be_recorded(op: str, model: Any) -> None:
    if getattr(getattr(model, "config", None), "model_type", None) == "subquad":
        raise ConfigError(f"{op}: {type(model).__name__} has no favor or softmax attention")
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"{op}: {type(model).__name__} has no favor or softmax attention of subquad and is no Hugging Face model"
        )


def no_other_mechanism(op: str, model: Any, others: int) -> None:
    """Mechanisms that are none of those asked for would be passed over, as if the model were exact."""
    if others:
        raise ConfigError(f"{op}: {type(model).__name__} has no favor or softmax attention")


def something_recorded(op: str, model: Any, layers: int) -> None:
    if not layers:
        raise ConfigError(
            f"{op}: {type(model).__name__} ran, but its attention did not go through subquad or through the attention "
            "interface of transformers"
        )


def whole_attention(
    name: str, q: Tensor, k: Tensor, mask: Tensor | None, options: Mapping[str, Any], past: int = 0
) -> None:
    """Attention that exact softmax over all real keys reproduces; options: of transformers' attention functions. past:
    tokens before those of k, in a state."""
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise ConfigError(f"{name}: attends with {option}, which is more than a softmax of q.k")
    window = options.get("sliding_window")
    tokens = past + k.shape[2]
    if window is not None and tokens > window:
        raise ConfigError(
            f"{name}: attends within a window of {window} tokens, got {tokens}; give batches of at most {window}"
        )
    if q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"{name}: got {q.shape[2]} queries and {k.shape[2]} keys; give whole sequences, without a cache "
            "(use_cache=False, also of generate and pipeline)"
        )
    if (positions := options.get("position_ids")) is not None:
        one_sequence_a_row(name, positions, mask)
