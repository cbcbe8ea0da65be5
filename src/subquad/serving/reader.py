"""Models that read tokens into caches: ours, and those of transformers whose attention was swapped."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from subquad.checks import count
from subquad.checks import serving as checks
from subquad.conversion.generation import IMPLEMENTATION, StateCache
from subquad.mechanism import Mechanism, State, outermost
from subquad.models.cache import SubquadCache
from subquad.models.modeling import SubquadPreTrainedModel
from subquad.nn import LayerState

CHUNK = 512  # tokens of a prompt that are read at once


class Reader:
    """A causal model, its mechanisms, and how it is called. op: who asks, for the errors."""

    def __init__(self, op: str, model: Any) -> None:
        self.model = model
        self.ours = isinstance(model, SubquadPreTrainedModel)
        swapped = getattr(getattr(model, "config", None), "_attn_implementation", None) == IMPLEMENTATION
        checks.causal_model(op, model, self.ours or swapped)
        checks.evaluating(op, model)
        self.mechanisms: list[Mechanism] = [mechanism for _, mechanism in outermost(model)]
        checks.keep_states(op, self.mechanisms)
        self.config = model.config.get_text_config(decoder=True)
        parameters = inspect.signature(model.forward).parameters
        checks.takes_positions(op, model, parameters)
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self) -> SubquadCache:
        return (SubquadCache if self.ours else StateCache)(len(self.mechanisms))

    @torch.no_grad()
    def read(self, cache: SubquadCache, ids: Tensor) -> Tensor:
        """Logits `[B, V]` after the next tokens ids `[B, T]`, which go into the cache; if it fails, none of them do."""
        before = cache.snapshot()
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if cache.length is not None:
            positions = positions + cache.length[:, None]
        try:
            given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, **self._options}
            return self.model(input_ids=ids, **given).logits[:, -1]
        except BaseException:
            cache.restore(before)
            raise

    def join(self, caches: Sequence[SubquadCache]) -> SubquadCache:
        """One cache of the sequences of all of them, no larger than the longest of these needs."""
        new = self.new_cache()
        new.length = torch.cat([cast(Tensor, cache.length) for cache in caches])
        longest = int(new.length.max())
        for layer, mechanism in enumerate(self.mechanisms):
            states = [cast("State | LayerState", cache.layers[layer].state) for cache in caches]
            new.layers[layer].set(_joined(mechanism, states), longest)
        return new

    def longest(self) -> int | None:
        """The most tokens that the model can read, or None."""
        config = self.config
        if self.ours:
            return config.max_position_embeddings if config.positions == "learned" else None
        limits = [getattr(config, "sliding_window", None)]
        if not any("rotary" in name for name, _ in self.model.named_modules()):  # a table of positions
            limits.append(getattr(config, "max_position_embeddings", None))
        return min((limit for limit in limits if limit is not None), default=None)


def _joined(mechanism: Mechanism, states: Sequence[State | LayerState]) -> State | LayerState:
    if not isinstance(states[0], LayerState):
        return mechanism.join_states(cast(Sequence[State], states))
    layers = [cast(LayerState, state) for state in states]
    attention = mechanism.join_states([layer.attention for layer in layers])
    return LayerState(attention, torch.cat([layer.recent for layer in layers]))


def read(model: Any, ids: Tensor | Sequence[int], *, chunk: int = CHUNK) -> SubquadCache:
    """A cache that has read a prompt: a start for `Batcher.submit`, to `fork`, or to keep by `save_cache`.

    `model.generate` goes on from it if it is given the whole sequence again, the prompt included.

    Args:
        model: a causal model of `subquad.models`, or one of transformers whose attention was swapped.
        ids: of the tokens, `[T]`, or `[B, T]` for prompts of equal length.
        chunk: tokens read at once; speed and memory only.

    Example:
        >>> from subquad.models import SubquadConfig, SubquadForCausalLM
        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> cache = read(SubquadForCausalLM(SubquadConfig(**sizes)).eval(), [3, 1, 4, 1, 5])
        >>> cache.get_seq_length()
        5
    """
    reader = Reader("read", model)
    count("read", "chunk", chunk)
    cache = reader.new_cache()
    prompt = checks.prompt("read", ids, reader.config.vocab_size, rows=True)
    checks.prompt_fits("read", prompt.shape[1], reader.longest())
    for piece in prompt.to(reader.device).split(chunk, 1):
        reader.read(cache, piece)
    return cache


def join(model: Any, caches: Sequence[SubquadCache]) -> SubquadCache:
    """One cache of the sequences of all caches, in their order, whatever their lengths.

    The next tokens need `position_ids`, which begin at `cache.length[:, None]`; `generate` would take the length of the
    longest for all. `Batcher` does all of it.
    """
    reader = Reader("join", model)
    checks.joinable("join", reader.mechanisms)
    checks.caches("join", caches, type(reader.new_cache()), len(reader.mechanisms))
    return reader.join(caches)
