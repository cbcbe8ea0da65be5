"""Models of Hugging Face with a head, of the families whose attention we swap; random weights, float64."""

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 23}


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=16, initializer_range=0.5, **options)).double().eval()


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options)).double().eval()


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "vocab_size": 23, "n_positions": 64, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options)).double().eval()


def opt(**options: Any) -> Any:
    """Scales its queries itself, and asks for no scale."""
    torch.manual_seed(0)
    sizes = {**SIZES, "ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "init_std": 0.5}
    return OPTForCausalLM(OPTConfig(**sizes, **options)).double().eval()


FAMILIES = {"bert": bert, "llama": llama, "gpt2": gpt2, "opt": opt}
