"""One Transformer for all mechanisms, as Hugging Face models."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from subquad.checks import models as checks
from subquad.features.buffers import LayerFeatures
from subquad.mechanism import Mechanism, RandomFeatures, outermost
from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.nn import (
    Block,
    Context,
    Rotation,
    SelfAttention,
    ShortConvolution,
    layer_seed,
    reversible,
    rotation,
    sinusoidal,
)


class SubquadPreTrainedModel(PreTrainedModel):
    config_class = SubquadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    config: SubquadConfig
    _no_split_modules = ["Block"]  # noqa: RUF012, transformers declares it so
    _keep_in_fp32_modules_strict = {"mechanism"}  # noqa: RUF012, random features in half precision are other features

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        owns_tensors = next(module.parameters(False), None) is not None or next(module.buffers(False), None) is not None
        if isinstance(module, (RandomFeatures, LayerFeatures, ShortConvolution)) and owns_tensors:
            module.reset_parameters()
        if isinstance(module, SelfAttention):
            module.reset_sizes()

    def mechanisms(self) -> list[Mechanism]:
        """The mechanism of each layer."""
        return [mechanism for _, mechanism in outermost(self)]

    def redraw(self, seed: int) -> int:
        """Fresh random features in every layer, or part of a mixed one, that has some; how many do. The same seed
        gives the same features."""
        drawn = [m for m in self.modules() if isinstance(m, RandomFeatures) and m.weight is not None]
        for layer, mechanism in enumerate(drawn):
            mechanism.redraw(layer_seed(seed, layer))
        return len(drawn)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        if self.config.reversible:
            raise checks.reversible_keeps_nothing()
        super().gradient_checkpointing_enable(*args, **kwargs)


class SubquadModel(SubquadPreTrainedModel):
    """Embeddings, blocks and a final norm: hidden states of each token.

    Example:
        >>> model = SubquadModel(SubquadConfig(vocab_size=10, hidden_size=32, num_hidden_layers=2))
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(_block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self._tied_weights_keys = self._shared_between_layers()
        self.post_init()

    @property
    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def _shared_between_layers(self) -> dict[str, str]:
        """What mechanisms share: the name in each later layer, and that in the first, as transformers ties weights."""
        first: dict[str, tuple[str, torch.Size]] = {}
        tied = {}
        for where, mechanism in self.named_modules():  # of mixed layers also the parts
            for name in mechanism.shared_parameters if isinstance(mechanism, Mechanism) else ():
                path, shape = f"{where}.{name}", getattr(mechanism, name).shape
                source, wanted = first.setdefault(f"{mechanism.name}.{name}", (path, shape))
                checks.same_in_all_layers(path, shape, source, wanted)
                if source != path:
                    tied[path] = source
        return tied

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """transformers' hook, which would tie nothing without `tie_word_embeddings`."""
        return super().get_expanded_tied_weights_keys(True) if all_submodels else dict(self._tied_weights_keys)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SubquadCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        """input_ids `[B, T]`; attention_mask `[B, T]` or, with a cache, `[B, past + T]`: 1 = real, padding anywhere."""
        checks.one_input(input_ids, inputs_embeds)
        checks.no_attention_output(output_attentions)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        key_mask = checks.model_mask(attention_mask, x, 0 if cache is None else cache.get_seq_length())
        positions = self._positions(x, key_mask, position_ids, cache)
        x = self.dropout(self._place(x, positions))
        turn = self._rotation(positions)
        x, hidden = self._run(x, Context(bool(self.config.causal), key_mask, turn), cache, bool(output_hidden_states))
        out = BaseModelOutputWithPast(cast(Any, x), cache, cast(Any, hidden))
        return out if return_dict is not False else out.to_tuple()

    def _rotation(self, positions: Tensor) -> Rotation | None:
        config = self.config
        if config.positions != "rotary":
            return None
        return rotation(positions, config.head_size, config.rope_theta, config.rotary_share)

    def _cache(self, given: SubquadCache | None, use_cache: bool | None) -> SubquadCache | None:
        if given is None and not use_cache:
            return None
        checks.cache(given, SubquadCache, bool(self.config.causal), len(self.layers))
        return SubquadCache(self.config.num_hidden_layers) if given is None else given

    def _positions(
        self, x: Tensor, key_mask: Tensor | None, given: Tensor | None, cache: SubquadCache | None
    ) -> Tensor:
        """`[B or 1, T]`: positions among the real tokens, so that padding moves no token."""
        if given is not None:
            checks.one_sequence_a_row("subquad model", given, key_mask)
        if cache is not None:
            counted = cache.advance(x.shape[0], x.shape[1], key_mask, x.device)
            return counted if given is None else given
        if given is not None:
            return given
        if key_mask is None:
            return torch.arange(x.shape[1], device=x.device)[None]
        return (key_mask.cumsum(-1) - 1).clamp(min=0)

    def _place(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.config.positions == "sinusoidal":
            return x + sinusoidal(positions, self.config.hidden_size).to(x.dtype)
        if self.embed_positions is not None:
            checks.learned_positions(positions, self.config.max_position_embeddings)
            return x + self.embed_positions(positions)
        return x

    def _run(
        self, x: Tensor, context: Context, cache: SubquadCache | None, keep_hidden: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        if self.config.reversible:
            return self._run_reversible(x, context, cache, keep_hidden)
        hidden = [x]
        for block, layer in zip(self.blocks, [None] * len(self.layers) if cache is None else cache.layers, strict=True):
            if layer is not None:
                x, state = block.extend(x, context, layer.state)
                layer.set(state, x.shape[1])
            elif self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(block.__call__, x, context)
            else:
                x = block(x, context)
            hidden.append(x)
        x = self.norm(x)
        return x, (*hidden[:-1], x) if keep_hidden else None

    def _run_reversible(
        self, x: Tensor, context: Context, cache: SubquadCache | None, keep_hidden: bool
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Both streams begin as the embedding and end as their mean."""
        if keep_hidden:
            raise checks.reversible_hides_states()
        x1 = x2 = x
        if cache is None:
            x1, x2 = reversible(x1, x2, self.blocks, context)
        else:
            for block, layer in zip(self.blocks, cache.layers, strict=True):
                out, state = block.attend_next(x2, context, layer.state)
                layer.set(state, x.shape[1])
                x1 = x1 + out
                x2 = x2 + block.transform(x1)
        return self.norm((x1 + x2) / 2), None


def _block(config: SubquadConfig, layer: int) -> Block:
    name, options = config.layer_attention(layer)
    return Block(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        gated=config.mlp == "gated",
        activation=config.hidden_act,
        dropout=config.dropout,
        eps=config.norm_eps,
        attention=name,
        options=options,
        num_key_value_heads=config.key_heads,
        head_dim=config.head_dim,
        shared_qk=config.shared_qk,
        layer=layer,
        max_length=config.max_position_embeddings,
        short_conv=config.short_conv,
        qk_norm=config.qk_norm,
    )
