"""Models of Hugging Face with random weights, small enough for float64."""

from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

SIZES: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, intermediate_size=16, initializer_range=0.5)).double().eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=4, initializer_range=0.5)).double().eval()


def llama() -> Any:
    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "intermediate_size": 16, "initializer_range": 0.5}
    return LlamaModel(LlamaConfig(**SIZES, **options)).double().eval()
