"""Puts a mechanism into every attention of a Hugging Face model, by the attention interface of transformers."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from subquad.checks import conversion as checks
from subquad.checks.recording import whole_attention
from subquad.conversion.generation import CHILD, IMPLEMENTATION, keyed_layer, use_states
from subquad.mechanism import Mechanism
from subquad.mechanisms import mechanism_class
from subquad.mechanisms.mixed import MixedAttention, checked_parts
from subquad.nn.self_attention import layer_mechanism
from subquad.recording.hugging_face import given_mask, implementation, is_causal

Model = TypeVar("Model", bound=nn.Module)


def swap_attention(
    model: Model,
    attention: str | Sequence[str] = "favor",
    *,
    layer_options: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> Model:
    """Replaces the attention of every layer, in place; all weights of the model stay as they are.

    Each attention module gets a child `subquad_attention`, the mechanism, with features of their own in each key head;
    it is in the state dict, and `subquad.calibrate` fits it. Swapping again replaces it. A causal model generates with
    the states of its mechanisms in the place of a cache of keys and values, if all of them have one; else generate with
    `use_cache=False`. `save_pretrained` writes what the layers are, too: `subquad.load` brings the model back, and
    plain transformers refuses the folder.

    A model loaded from GGUF can be saved afterwards, with its weights as floats, if transformers has unpacked them;
    if they stay packed (which takes its GGUF kernels), load it with `GgufConfig(dequantize=True)` first.

    Args:
        model: any model of transformers whose attention goes through its attention interface (BERT, GPT-2, Llama, ...).
        attention: name of the mechanism, or of one for each layer.
        options: of the mechanism, for all layers.
        layer_options: of each layer's mechanism, where layers differ.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        >>> model = swap_attention(BertModel(BertConfig(**sizes)), "favor", num_features=32, near=0)
        >>> model.encoder.layer[0].attention.self.subquad_attention.num_features
        32
    """
    from subquad.conversion.saved import remember

    found = list(replaceable_modules(model).values())
    names, given = checks.of_each_layer(attention, options, layer_options, len(found))
    for module, mechanism in zip(found, mechanisms_of(model, names, given), strict=True):
        setattr(module, CHILD, mechanism.train(module.training))
    _register()
    model.set_attn_implementation(IMPLEMENTATION)  # pyright: ignore[reportCallIssue]
    checks.goes_through_us(model, IMPLEMENTATION)
    _forget_gguf(model)
    remember(model, names, given)
    use_states(model)
    return model


def mechanisms_of(model: Any, attention: Sequence[str], options: Sequence[dict[str, Any]]) -> list[Mechanism]:
    """New ones, as the layers of the model need them, where they compute."""
    made = []
    for layer, module in enumerate(replaceable_modules(model).values()):
        head_dim, key_heads = head_sizes(module)
        own = with_scale(attention[layer], options[layer], scaling(module, head_dim))
        mechanism = layer_mechanism(attention[layer], own, head_dim=head_dim, key_heads=key_heads, layer=layer)
        made.append(mechanism.to(_device(module, model)))
    return made


@contextmanager
def mechanisms_in_place(model: Any, mechanisms: Sequence[Mechanism]) -> Iterator[None]:
    """For a while these are the attention of the model, which has none of ours before and afterwards."""
    modules = list(replaceable_modules(model).values())
    _register()
    try:
        for module, mechanism in zip(modules, mechanisms, strict=True):
            setattr(module, CHILD, mechanism)
        with implementation(model, IMPLEMENTATION):
            yield
    finally:
        for module in modules:
            if hasattr(module, CHILD):
                delattr(module, CHILD)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, given_mask)


@contextmanager
def without_mechanisms(model: Any) -> Iterator[None]:
    """For a while the model is what it was before its attention was swapped, if it was."""
    modules = [module for _, module in attention_modules(model) if hasattr(module, CHILD)]
    kept = [getattr(module, CHILD) for module in modules]
    for module in modules:
        delattr(module, CHILD)
    try:
        with implementation(model, "sdpa") if modules else nullcontext():
            yield
    finally:
        for module, mechanism in zip(modules, kept, strict=True):
            setattr(module, CHILD, mechanism)


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    """Where the module computes; one without weights of its own, where its model does."""
    tensors = itertools.chain(module.parameters(), module.buffers(), model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _forget_gguf(model: Any) -> None:
    """transformers refuses to save what it has loaded from GGUF, also if it has unpacked all weights into floats.

    Weights that stay packed keep their mark: they can be saved after loading with `GgufConfig(dequantize=True)` only.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if quantizer is not None and method == "gguf" and not quantizer.packed_modules:
        quantizer.remove_quantization_config(model)


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Those that call the attention interface: they know whether they are causal, and their config."""
    named = model.named_modules()
    return [(name, module) for name, module in named if hasattr(module, "is_causal") and hasattr(module, "config")]


def replaceable_modules(model: Any) -> dict[str, Any]:
    """The same by name; raises if there are none, or if one of them cannot be replaced."""
    found = attention_modules(model)
    checks.something_to_swap(model, len(found))
    for name, module in found:
        checks.self_attention_module(name, module)
        checks.tells_its_heads(name, module)
    return dict(found)


def head_sizes(module: Any) -> tuple[int, int]:
    """The head dim and the number of key heads of an attention module."""
    head_dim = getattr(module, "head_dim", None) or module.attention_head_size
    config = module.config
    return head_dim, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def scaling(module: Any, head_dim: int) -> dict[str, float]:
    """The scale of the logits, if it is not the usual one."""
    scale = module_scale(module, head_dim)
    return {} if scale == head_dim**-0.5 else {"scale": scale}


def with_scale(name: str, options: dict[str, Any], scale: dict[str, float]) -> dict[str, Any]:
    """The options, and the scale if the mechanism has one, or the parts of a mixed one that do."""
    kind = mechanism_class(name)
    if kind is MixedAttention:
        parts = checked_parts(options.get("parts"))
        return options | {"parts": [with_scale(part["attention"], part, scale) for part in parts]}
    scaled = name != "linear" and "scale" in inspect.signature(kind).parameters  # that of `linear` is its projection's
    return (scale if scaled else {}) | options


def module_scale(module: Any, head_dim: int) -> float:
    return getattr(module, "scaling", None) or head_dim**-0.5


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """q `[B, H, T, D]`, k, v `[B, K, T, D]`, mask `[B, T]`; the output `[B, T, H, D]`, and no weights."""
    name = type(module).__name__
    layer = keyed_layer(k)
    whole_attention(name, q, k, mask, options, past=0 if layer is None else layer.tokens)
    checks.no_dropout(name, dropout)
    checks.padding_mask(name, mask)
    asked = q.shape[-1] ** -0.5 if scaling is None else scaling
    if (usual := module_scale(module, q.shape[-1])) != asked:  # some models scale their queries before
        q = q * (asked / usual)
    mechanism = checks.mechanism_there(name, getattr(module, CHILD, None))
    causal, real = is_causal(module, options), None if mask is None else mask.bool()
    if layer is None:
        return mechanism(q, k, v, causal=causal, key_mask=real).transpose(1, 2), None
    checks.causal_if_cached(name, causal)
    return layer.extend(mechanism, q, k, v, real).transpose(1, 2), None
