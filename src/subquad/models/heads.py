"""What the model is asked for: the next token, hidden tokens, a label for a sequence or for each token."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from subquad.checks import models as checks
from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.models.modeling import SubquadModel, SubquadPreTrainedModel


class SubquadForCausalLM(SubquadPreTrainedModel, GenerationMixin):
    """Predicts the next token; `generate()` carries the mechanisms' states.

    Example:
        >>> model = SubquadForCausalLM(SubquadConfig(vocab_size=10, hidden_size=32, num_hidden_layers=2))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    accepts_loss_kwargs = True  # the Trainer then hands over `num_items_in_batch`
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, as transformers declares it

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(checks.head_direction(config, "SubquadForCausalLM", causal=True))
        self.model = SubquadModel(config)
        checks.can_be_causal(self.mechanisms())
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        """labels `[B, T]`: input_ids again, -100 where nothing is to be predicted; shifting is done here."""
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_hidden_states,
            output_attentions,
        )  # fmt: skip
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result if return_dict is not False else result.to_tuple()

    if TYPE_CHECKING:  # transformers types it for models of its own only

        def generate(self, *args: Any, **kwargs: Any) -> Any: ...

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:  # pyright: ignore
        """transformers' hook that would make a cache of keys and values."""
        if generation_config.cache_implementation is not None:
            raise checks.cache_is_ours(generation_config.cache_implementation)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = SubquadCache(self.config.num_hidden_layers)


class SubquadForMaskedLM(SubquadPreTrainedModel):
    """Predicts masked tokens from both sides."""

    accepts_loss_kwargs = True  # the Trainer then hands over `num_items_in_batch`
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, as transformers declares it

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(checks.head_direction(config, "SubquadForMaskedLM", causal=False))
        self.model = SubquadModel(config)
        checks.can_be_bidirectional("SubquadForMaskedLM", self.mechanisms(), "SubquadForCausalLM (objective='causal')")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput | tuple:
        """labels `[B, T]`: the true token where it is to be predicted, -100 elsewhere."""
        out = self.model(
            input_ids, attention_mask, position_ids, None, inputs_embeds, None, output_hidden_states, output_attentions
        )
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        result = MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return result if return_dict is not False else result.to_tuple()


class _Classifier(SubquadPreTrainedModel, ABC):
    """A linear layer on vectors made of the hidden states."""

    output: type[SequenceClassifierOutput] | type[TokenClassifierOutput]

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.model = SubquadModel(config)
        if not config.causal:
            checks.can_be_bidirectional(type(self).__name__, self.mechanisms(), "causal=True in the config")
        self.num_labels = cast(int, config.num_labels)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @abstractmethod
    def vectors(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """What is classified, `[..., E]`."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over all labels."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | TokenClassifierOutput | tuple:
        out = self.model(
            input_ids, attention_mask, position_ids, None, inputs_embeds, None, output_hidden_states, output_attentions
        )
        logits = self.score(self.vectors(out.last_hidden_state, attention_mask))
        loss = None if labels is None else self.loss(logits, labels)
        result = self.output(loss=cast(Any, loss), logits=logits, hidden_states=out.hidden_states)
        return result if return_dict is not False else result.to_tuple()


class SubquadForSequenceClassification(_Classifier):
    """One label for a sequence, `[B]`: from the mean of its real tokens or, if the model is causal, from the last."""

    output = SequenceClassifierOutput

    def vectors(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        return pool(hidden, attention_mask, last=bool(self.config.causal))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_function(labels, logits, self.config)


class SubquadForTokenClassification(_Classifier):
    """One label for each token, `[B, T]`, -100 where there is none (secondary structure, binding sites, entities)."""

    output = TokenClassifierOutput

    def vectors(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        return hidden

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_function(logits, labels, self.config)


def pool(hidden: Tensor, attention_mask: Tensor | None, *, last: bool) -> Tensor:
    """`[B, T, E] -> [B, E]`: the last real token, or the mean of the real ones (zeros if there is none)."""
    if attention_mask is None:
        return hidden[:, -1] if last else hidden.mean(1)
    real = attention_mask.bool()
    if last:
        index = torch.where(real, torch.arange(real.shape[1], device=real.device), 0).amax(-1)
        return hidden[torch.arange(len(hidden), device=hidden.device), index]
    return hidden.masked_fill(~real[..., None], 0).sum(1) / real.sum(-1, keepdim=True).clamp(min=1)
