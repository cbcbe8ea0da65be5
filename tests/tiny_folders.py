"""Folders of models of transformers with random weights and tokenizers of a few words, as a user would have them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertTokenizer,
    EsmConfig,
    EsmForMaskedLM,
    EsmTokenizer,
    PreTrainedTokenizerFast,
)

import tiny_heads
from subquad.conversion import swap_attention

LETTERS = "abcdefghijklmnopqrs "
START, END, UNKNOWN = 20, 21, 22  # behind the letters
RESIDUES = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"  # as ESM has
MIXED: dict[str, Any] = {
    "layer_options": [
        {
            "parts": [
                {"attention": "favor", "heads": [0], "num_features": 16, "near": 4, "sinks": 1},
                {"attention": "softmax", "heads": [1]},
            ]
        },
        {
            "parts": [
                {"attention": "window", "heads": [0], "window": 8},
                {"attention": "favor", "heads": [1], "num_features": 16, "near": 4},
            ]
        },
    ]
}


def letters(*, front: bool, **named: Any) -> PreTrainedTokenizerFast:
    """A token for each letter. front: <s> in front of every text. named: bos_token, eos_token, ..."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<s>": START, "</s>": END, "<unk>": UNKNOWN}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if front:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **named)


def save_llama(folder: Path, **options: Any) -> Any:
    """Its tokenizer puts a start token in front of every text."""
    model = tiny_heads.llama(bos_token_id=START, eos_token_id=END, max_position_embeddings=96, **options)
    model.save_pretrained(folder)
    letters(front=True, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return model


def save_converted(folder: Path) -> Any:
    """The same with `mixed` layers."""
    save_llama(folder)
    model = tiny_heads.llama(bos_token_id=START, eos_token_id=END, max_position_embeddings=96)
    swap_attention(model, "mixed", **MIXED).save_pretrained(folder)
    return model


def save_gpt2(folder: Path, **named: Any) -> Any:
    """Its tokenizer puts nothing in front; the token that ends texts begins them, too, unless others are named."""
    model = tiny_heads.gpt2(bos_token_id=END, eos_token_id=END)
    model.save_pretrained(folder)
    letters(front=False, **(named or {"bos_token": "</s>", "eos_token": "</s>"})).save_pretrained(folder)
    return model


def save_bert(folder: Path) -> Any:
    model = tiny_heads.bert(max_position_embeddings=32)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "it", "goes", "##es"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return model


def save_esm(folder: Path, positions: str = "rotary") -> Any:
    """positions: "rotary" as in ESM-2, "absolute" as in ESM-1b."""
    torch.manual_seed(0)
    sizes = {**tiny_heads.SIZES, "vocab_size": 33, "intermediate_size": 16, "max_position_embeddings": 34}
    kind = {"pad_token_id": 1, "mask_token_id": 32, "token_dropout": True, "position_embedding_type": positions}
    model = EsmForMaskedLM(EsmConfig(**sizes, **kind, initializer_range=0.5)).double().eval()
    model.save_pretrained(folder)
    (folder / "words.txt").write_text("\n".join(RESIDUES.split()))
    EsmTokenizer(str(folder / "words.txt")).save_pretrained(folder)
    (folder / "words.txt").unlink()
    return model
