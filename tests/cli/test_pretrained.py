"""Commands on folders of models of transformers, as they are or converted, against transformers alone."""

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny_folders
import tiny_heads
from subquad.cli import main
from subquad.cli.common import load_model
from subquad.cli.generate import Stream
from subquad.cli.pretrained import Pretrained, reads_residues, task_of
from subquad.conversion import swap_attention
from subquad.data import protein_tokenizer, read_fasta
from tiny_folders import END, START

TEXTS = {"a.txt": "a fine road led on and on", "b.txt": "so it goes"}
PROTEINS = {"first": "MKVLATGGSW", "second": "mkv"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders by name, their models, and what to read."""
    folder = tmp_path_factory.mktemp("folders")
    kinds = ("llama", "converted", "gpt2", "bert", "esm")
    saved = {kind: getattr(tiny_folders, f"save_{kind}")(folder / kind) for kind in kinds}
    (folder / "texts").mkdir()
    for name, text in TEXTS.items():
        (folder / "texts" / name).write_text(text)
    (folder / "some.fasta").write_text("".join(f">{name} of\n{residues}*\n" for name, residues in PROTEINS.items()))
    return {"models": saved, **{path.name: path for path in folder.iterdir()}}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def complaint(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err.removeprefix("subquad: error: ").rstrip("\n")


# Score ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def summed(model: Any, ids: list[int], first: int) -> float:
    """log p of the tokens from the one numbered `first`, by the model alone."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return float(sum(logits[place - 1, ids[place]] for place in range(first, len(ids))))


@pytest.mark.parametrize("kind", ["llama", "converted", "gpt2"])
def test_scores_are_sums_of_log_probabilities(kind: str, folders: Any, tmp_path: Path, capsys: Any) -> None:
    """The first token is judged after the start token, whether the tokenizer puts it there or not."""
    assert main(["score", str(folders[kind]), str(folders["texts"]), "--output", str(tmp_path / "s.csv")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    for row, (name, text) in zip(rows(tmp_path / "s.csv"), TEXTS.items(), strict=True):
        ids = tokenizer(text)["input_ids"]
        ids = ids if kind != "gpt2" else [END, *ids]
        assert ids[0] == (END if kind == "gpt2" else START)
        want = summed(folders["models"][kind], ids, 1)
        assert row["name"] == str(folders["texts"] / name)
        assert int(row["length"]) == len(text)
        assert float(row["log_likelihood"]) == pytest.approx(want, abs=1e-5)
        assert float(row["perplexity"]) == pytest.approx(np.exp(-want / len(text)), rel=1e-5)
    told = "the tokenizer puts nothing in front of a text: the first token was judged after </s>"
    assert (told in capsys.readouterr().err) == (kind == "gpt2")


def test_without_a_start_token_the_end_token_stands_there(folders: Any, tmp_path: Path, capsys: Any) -> None:
    model = tiny_folders.save_gpt2(tmp_path / "gpt2", eos_token="<s>")
    assert main(["score", str(tmp_path / "gpt2"), str(folders["texts"] / "b.txt")]) == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "gpt2")(TEXTS["b.txt"])["input_ids"]
    shown = capsys.readouterr()
    assert float(shown.out.splitlines()[1].split(",")[2]) == pytest.approx(summed(model, [START, *ids], 1), abs=1e-5)
    assert "the first token was judged after <s>" in shown.err


@torch.no_grad()
def pseudo(model: Any, ids: list[int], mask: int, passes: int | None) -> float:
    """log p of every token but the first and the last, of which every passes-th is hidden at a time."""
    total, inner = 0.0, range(1, len(ids) - 1)
    count = len(inner) if passes is None else min(passes, len(inner))
    for first in range(count):
        hidden = list(inner)[first::count]
        given = torch.tensor([ids])
        given[0, hidden] = mask
        logits = model(given, attention_mask=torch.ones_like(given)).logits[0].log_softmax(-1)
        total += float(sum(logits[place, ids[place]] for place in hidden))
    return total


@pytest.mark.parametrize(("options", "passes"), [(["--exact"], None), (["--passes", "3"], 3), ([], 8)])
@pytest.mark.parametrize("kind", ["bert", "esm"])
def test_pseudo_scores_hide_tokens(
    kind: str, options: list[str], passes: int | None, folders: Any, tmp_path: Path
) -> None:
    """Sequences of different lengths go in one batch; those of proteins come from FASTA."""
    read = folders["some.fasta"] if kind == "esm" else tmp_path / "words"
    if kind == "bert":
        read.mkdir()
        (read / "a.txt").write_text("so it goes goes so so it it goes so it")
        (read / "b.txt").write_text("so it")
    assert main(["score", str(folders[kind]), str(read), "--output", str(tmp_path / "s.csv"), *options]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    texts = [s.upper() for s in PROTEINS.values()] if kind == "esm" else [f.read_text() for f in sorted(read.iterdir())]
    for row, text in zip(rows(tmp_path / "s.csv"), texts, strict=True):
        ids = tokenizer(text)["input_ids"]
        want = pseudo(folders["models"][kind], ids, tokenizer.mask_token_id, passes)
        assert int(row["length"]) == len(ids) - 2
        assert float(row["pseudo_log_likelihood"]) == pytest.approx(want, abs=1e-5)


# Embed ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def states(model: Any, ids: list[int]) -> Tensor:
    given = torch.tensor([ids])
    return model.base_model(given, attention_mask=torch.ones_like(given)).last_hidden_state[0].float()


@pytest.mark.parametrize("kind", ["llama", "converted", "gpt2", "bert", "esm"])
def test_embeddings_leave_special_tokens_out(kind: str, folders: Any, tmp_path: Path) -> None:
    read = folders["some.fasta"] if kind == "esm" else folders["texts"]
    texts = [s.upper() for s in PROTEINS.values()] if kind == "esm" else list(TEXTS.values())
    arrays = []
    for flag in ([], ["--per-token"]):
        assert main(["embed", str(folders[kind]), str(read), "--output", str(tmp_path / "v.npz"), *flag]) == 0
        arrays.append(np.load(tmp_path / "v.npz"))
    tokenizer, model = AutoTokenizer.from_pretrained(folders[kind]), folders["models"][kind]
    wanted = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        first, last = {"gpt2": (0, 0), "llama": (1, 0), "converted": (1, 0)}.get(kind, (1, 1))
        wanted.append(states(model, ids)[first : len(ids) - last])
    assert arrays[1]["lengths"].tolist() == [len(vectors) for vectors in wanted]
    assert np.allclose(arrays[1]["embeddings"], torch.cat(wanted), atol=1e-5)
    assert np.allclose(arrays[0]["embeddings"], torch.stack([vectors.mean(0) for vectors in wanted]), atol=1e-5)


def test_fasta_by_the_name_of_the_file(folders: Any, tmp_path: Path) -> None:
    """A model of text reads the sequences of such a file, not its lines."""
    with gzip.open(tmp_path / "x.faa.gz", "wt") as file:
        file.write(">one\nabc\nde\n")
    assert main(["score", str(folders["llama"]), str(tmp_path / "x.faa.gz"), "--output", str(tmp_path / "s.csv")]) == 0
    (row,) = rows(tmp_path / "s.csv")
    assert (row["name"], row["length"]) == ("one", "5")


# Generate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "converted", "gpt2"])
def test_text_goes_on_as_transformers_would(kind: str, folders: Any, tmp_path: Path, capsys: Any) -> None:
    words = ["generate", str(folders[kind]), "--prompt", "a road ", "--length", "12", "--greedy"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    ids = tokenizer("a road ", return_tensors="pt")["input_ids"]
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": END}
    want = tokenizer.decode(folders["models"][kind].generate(ids, **how)[0], skip_special_tokens=True)
    assert shown == want + "\n"
    assert main([*words, "--output", str(tmp_path / "x.txt")]) == 0
    assert (tmp_path / "x.txt").read_text() == want + "\n"


def test_without_a_prompt_the_start_token_is_gone_on_from(folders: Any, capsys: Any) -> None:
    assert main(["generate", str(folders["gpt2"]), "--length", "9", "--greedy", "--endless"]) == 0
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "suppress_tokens": [END], "pad_token_id": END}
    made = folders["models"]["gpt2"].generate(torch.tensor([[END]]), **how)[0]
    tokenizer = AutoTokenizer.from_pretrained(folders["gpt2"])
    assert capsys.readouterr().out == tokenizer.decode(made, skip_special_tokens=True) + "\n"


def ending(folder: Path, token: str, **more: Any) -> None:
    """generation_config.json names another token that ends texts, and beams."""
    path = folder / "generation_config.json"
    more |= {"eos_token_id": [END, tiny_folders.LETTERS.index(token)], "num_beams": 3}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def test_texts_end_where_the_generation_config_says(tmp_path: Path, capsys: Any) -> None:
    tiny_folders.save_llama(tmp_path / "llama")
    words = ["generate", str(tmp_path / "llama"), "--prompt", "j", "--length", "80", "--num", "4"]
    ending(tmp_path / "llama", "j", suppress_tokens=[0, 1, 2])
    assert main(words) == 0
    samples = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert all(sample[0] == "j" and "j" not in sample[1:] for sample in samples)  # of a prompt, it ends nothing
    assert all(not set(sample) & set("abc") for sample in samples)
    assert len({len(sample) for sample in samples}) > 1
    assert main([*words, "--endless"]) == 0
    samples = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert all("j" not in sample[1:] and not set(sample) & set("abc") for sample in samples)
    tokens = load_model(tmp_path / "llama").generation(endless=True)["suppress_tokens"]
    assert tokens == [0, 1, 2, END, tiny_folders.LETTERS.index("j")]


def test_a_token_that_ends_is_not_shown(tmp_path: Path, capsys: Any) -> None:
    """Neither as text grows nor afterwards, though it is an ordinary letter here."""
    tiny_folders.save_llama(tmp_path / "llama")
    words = ["generate", str(tmp_path / "llama"), "--prompt", "a road ", "--length", "30", "--greedy"]
    assert main(words) == 0
    whole = capsys.readouterr().out
    new = whole[len("a road ") :]
    last = next(letter for place, letter in enumerate(new) if place > 2 and letter not in new[:place])
    ending(tmp_path / "llama", last)
    assert main(words) == 0
    assert capsys.readouterr().out == "a road " + new[: new.index(last)] + "\n"


def test_text_that_grows_has_spaces_between_words(capsys: Any) -> None:
    """Tokenizers with a mark for spaces drop the first one of what they decode."""
    inner = Tokenizer(models.WordLevel({"\u2581so": 0, "\u2581it": 1, "\u2581goes": 2, "es": 3, "<s>": 4}))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    loaded = Pretrained(None, tokenizer, "text", Path(), "", "causal", ((4,), ()))
    with Stream(loaded, 1, 9, live=True) as stream:
        for tokens in ([4, 0], [1], [2], [3]):
            stream.put(torch.tensor([tokens]))
        stream.end()
    assert tokenizer.decode([1]) == "it"
    assert capsys.readouterr().out == "so it goeses\n"


def test_a_causal_model_of_residues_writes_fasta(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_head": 4, "n_layer": 1, "vocab_size": 31, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(tmp_path / "model")
    protein_tokenizer().save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "--prompt", "mkv", "--length", "30", "--num", "2"]
    assert main([*words, "--output", str(tmp_path / "x.fasta")]) == 0
    made = [sequence for _, sequence in read_fasta(tmp_path / "x.fasta")]
    assert len(made) == 2
    assert all(sequence.startswith("MKV") and sequence.isascii() for sequence in made)


def test_new_tokens_end_at_the_last_position(folders: Any, capsys: Any) -> None:
    """500 unless given, but never more than the model has positions for."""
    assert main(["generate", str(folders["gpt2"]), "--prompt", "abcd", "--endless", "--greedy"]) == 0
    capsys.readouterr()
    assert complaint(["generate", folders["gpt2"], "--prompt", "abcd", "--length", "61"], capsys) == (
        "--length: the model takes at most 64 tokens, and the prompt has 4; give at most 60"
    )
    assert complaint(["generate", folders["gpt2"], "--prompt", "a" * 64], capsys) == (
        "--prompt: has 64 tokens with special ones, but the model takes at most 64"
    )


# What a folder is ----------------------------------------------------------------------------------------------------


def test_tasks() -> None:
    """By the class that was saved; classes of encoders look ahead unless their config says otherwise."""
    cases: list[tuple[Any, dict[str, Any], str | None]] = [
        (transformers.LlamaForCausalLM, {}, "causal"),
        (transformers.GPT2LMHeadModel, {}, "causal"),
        (transformers.BertForMaskedLM, {}, "masked"),
        (transformers.BertLMHeadModel, {}, None),
        (transformers.BertLMHeadModel, {"is_decoder": True}, "causal"),
        (transformers.XLMWithLMHeadModel, {}, "masked"),
        (transformers.XLMWithLMHeadModel, {"causal": True}, "causal"),
        (transformers.EsmForMaskedLM, {}, "masked"),
        (transformers.LlamaModel, {}, None),
        (transformers.BertForSequenceClassification, {}, None),
    ]
    for kind, options, task in cases:
        assert task_of(kind, kind.config_class(**options)) == task, kind


def test_what_residues_are(folders: Any) -> None:
    """A vocabulary of the 20 amino acids and signs; with a word or a small letter it is one of text."""
    assert load_model(folders["esm"]).domain == "protein"
    assert [load_model(folders[kind]).domain for kind in ("llama", "bert")] == ["text", "text"]

    def reads(tokens: str) -> bool:
        vocabulary = {token: i for i, token in enumerate([*tokens.split(), "<unk>"])}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        return reads_residues(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))

    acids = "A C D E F G H I K L M N P Q R S T V W Y"
    assert reads(acids)
    assert reads(f"{acids} X - . <null_1> [PAD]")
    assert not reads(f"{acids} AC")
    assert not reads(f"{acids} a")
    assert not reads(acids.removesuffix(" Y"))


# Folders and names ----------------------------------------------------------------------------------------------------


def test_names_of_the_hub(folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of the files of a model neither pickles nor code are fetched."""
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(folders["gpt2"])

    monkeypatch.chdir(tmp_path)
    text = str(folders["texts"] / "b.txt")
    reason = complaint(["score", "owner/name", text], capsys)
    assert reason.startswith(
        "owner/name: there is no such folder, and no model of this name could be had from the hub ("
    )
    assert reason.endswith("); give a run folder, a model folder, or download the model first")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["score", "owner/name", text]) == 0
    by_name = capsys.readouterr().out
    assert main(["score", str(folders["gpt2"]), text]) == 0
    assert capsys.readouterr().out == by_name
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    assert asked == [("owner/name", {"allow_patterns": patterns, "ignore_patterns": ["*/*", "files.json"]})]
    for name in ("name", "a/b/c", "/owner/name", "../name", "owner/na me"):
        assert complaint(["score", name, text], capsys) == (
            f"{name}: does not exist; give a run folder or a model folder"
        )
    Path("owner/name").mkdir(parents=True)
    assert complaint(["score", "owner/name", text], capsys) == (
        "owner/name: holds no model (no config.json), nor is it a run with a checkpoint; give a run folder or a model "
        "folder"
    )


def changed(folder: Path, copy: Path, **values: Any) -> Path:
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return copy


def test_weights_that_are_missing_are_not_drawn(folders: Any, tmp_path: Path, capsys: Any) -> None:
    """Neither those of a model, nor the features of a converted one."""
    for kind, end in (("llama", "layers.1.mlp.up_proj.weight"), ("converted", "favor0.features.weight")):
        shutil.copytree(folders[kind], tmp_path / kind)
        weights = load_file(tmp_path / kind / "model.safetensors")
        (name,) = [name for name in weights if (name.endswith(end) and "layers.1." in name) or end in name]
        save_file({key: x for key, x in weights.items() if key != name}, tmp_path / kind / "model.safetensors")
        assert complaint(["score", tmp_path / kind, folders["texts"]], capsys) == (
            f"{tmp_path / kind}: the weights are not those of the config ({name} ...)"
        )


def test_parts_of_bert_that_nobody_asks_for(folders: Any, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(folders["bert"], tmp_path / "bert")
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    more = {"cls.seq_relationship.bias": torch.zeros(2), "bert.pooler.dense.bias": torch.zeros(16)}
    save_file({**weights, **more}, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    assert main(["score", str(folders["bert"]), str(folders["texts"])]) == 0
    want = capsys.readouterr().out
    assert main(["score", str(tmp_path / "bert"), str(folders["texts"])]) == 0
    assert capsys.readouterr().out == want


def test_mistakes(folders: Any, tmp_path: Path, capsys: Any) -> None:
    texts, fasta = folders["texts"], folders["some.fasta"]

    def message(command: str, model: Path, *more: Any) -> str:
        return complaint([command, model, *more], capsys)

    bert, esm = folders["bert"], folders["esm"]
    for model, name in ((bert, "BertForMaskedLM"), (esm, "EsmForMaskedLM")):
        assert message("generate", model) == (
            f"{model}: was saved as {name}, which is no causal language model and cannot generate; give one such as "
            "LlamaForCausalLM"
        )
    body = changed(folders["llama"], tmp_path / "body", architectures=["LlamaModel"])
    LlamaModel(tiny_heads.llama().config).save_pretrained(body)
    assert message("score", body, texts) == (
        f"{body}: was saved as LlamaModel, which predicts no tokens; score takes causal and masked language models, "
        "such as LlamaForCausalLM and BertForMaskedLM"
    )
    assert message("score", folders["gpt2"], texts, "--passes", "3") == (
        "score: --exact and --passes are for masked models; this one is causal"
    )
    nothing = changed(folders["llama"], tmp_path / "nothing", architectures=["os"])
    assert message("embed", nothing, texts) == (
        f"{nothing}: its config.json names no class of transformers (architectures: 'os')"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (nothing / name).unlink()
    shutil.copy(folders["llama"] / "config.json", nothing / "config.json")
    assert message("score", nothing, texts) == (
        f"{nothing}: holds no tokenizer (tokenizer.json or the like); save the one of the model beside it"
    )
    (nothing / "tokenizer.json").write_text("{")
    assert message("score", nothing, texts).startswith(f"{nothing}: its tokenizer cannot be loaded (")
    T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=1)).save_pretrained(
        tmp_path / "t5"
    )
    assert message("embed", tmp_path / "t5", texts) == (
        f"{tmp_path / 't5'}: T5ForConditionalGeneration is an encoder-decoder model; the command line runs models that "
        "read one sequence, such as Llama, GPT-2, BERT or ESM"
    )
    sight = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    transformers.ViTModel(sight).save_pretrained(tmp_path / "vit")
    assert message("embed", tmp_path / "vit", texts) == (
        f"{tmp_path / 'vit'}: ViTModel reads pixel_values; the command line runs models that read tokens"
    )
    assert message("score", esm, texts / "b.txt") == (
        f"{texts / 'b.txt'}: is not FASTA, its first line must begin with '>', got 'so it goes'"
    )
    fasta = tmp_path / "odd.fasta"
    fasta.write_text(">odd\nMKJ\n")
    assert message("embed", esm, fasta) == (
        f"{fasta}: odd: 'J' at position 3 is no token of the model; replace it, by X if the model has one"
    )
    (tmp_path / "empty.txt").write_text("")
    assert message("score", bert, tmp_path / "empty.txt") == f"{tmp_path / 'empty.txt'}: holds no text"
    assert message("calibrate", bert, texts, "--out", tmp_path / "x") == (
        f"{bert}: is a 'bert' model; subquad calibrate takes models trained by subquad. In Python, subquad.calibrate "
        "fits a model of transformers whose attention was swapped"
    )


def test_tokenizers_that_lack_a_token(folders: Any, tmp_path: Path, capsys: Any) -> None:
    tiny_folders.save_gpt2(tmp_path / "gpt2", pad_token="<unk>")
    path = tmp_path / "gpt2" / "generation_config.json"
    path.write_text("{}")
    assert complaint(["score", tmp_path / "gpt2", folders["texts"]], capsys) == (
        f"{tmp_path / 'gpt2'}: its tokenizer puts nothing in front of a text and has neither a start nor an end token, "
        "so nothing says how a text begins; name one in its tokenizer_config.json (bos_token), or give a --prompt to "
        "generate"
    )
    tiny_heads.bert().save_pretrained(tmp_path / "bert")
    tiny_folders.letters(front=True).save_pretrained(tmp_path / "bert")
    assert complaint(["score", tmp_path / "bert", folders["texts"]], capsys) == (
        f"{tmp_path / 'bert'}: its tokenizer has no mask token, so no token can be hidden; name it in its "
        "tokenizer_config.json (mask_token)"
    )
    small = tiny_heads.llama()
    small.resize_token_embeddings(12)
    small.save_pretrained(tmp_path / "small")
    tiny_folders.letters(front=True).save_pretrained(tmp_path / "small")
    text = folders["texts"] / "b.txt"
    end = "the model knows 12 tokens only; its tokenizer is of another model"
    assert complaint(["score", tmp_path / "small", text], capsys) == (
        f"{tmp_path / 'small'}: {text} becomes token {tiny_folders.UNKNOWN}, but {end}"
    )
    tiny_folders.letters(front=False, bos_token="<s>").save_pretrained(tmp_path / "small")
    assert complaint(["generate", tmp_path / "small"], capsys) == (
        f"{tmp_path / 'small'}: the first token becomes token {START}, but {end}"
    )


@pytest.mark.parametrize("command", ["score", "embed"])
@pytest.mark.parametrize(("kind", "limit"), [("llama", 96), ("converted", 96), ("gpt2", 64), ("bert", 32)])
def test_texts_that_are_too_long(
    command: str, kind: str, limit: int, folders: Any, tmp_path: Path, capsys: Any
) -> None:
    """The longest one is read, one more token is refused; special tokens count."""
    word, special = {"bert": ("so ", 2), "gpt2": ("a", 0)}.get(kind, ("a", 1))
    text = tmp_path / "long.txt"
    output = ["--output", str(tmp_path / ("x.csv" if command == "score" else "x.npz"))]
    text.write_text(word * (limit - special))
    assert main([command, str(folders[kind]), str(text), *output]) == 0
    text.write_text(word * (limit - special + 1))
    assert complaint([command, folders[kind], text, *output], capsys) == (
        f"{text}: has {limit + 1} tokens with special ones, but the model takes at most {limit}; cut it into shorter "
        "ones"
    )


def test_learned_positions_that_begin_behind_padding(tmp_path: Path, capsys: Any) -> None:
    """34 in the config, but the first two of them are for padding."""
    tiny_folders.save_esm(tmp_path / "esm", positions="absolute")
    for residues in (30, 31):
        (tmp_path / "x.fasta").write_text(f">x\n{'M' * residues}\n")
        words = ["score", str(tmp_path / "esm"), str(tmp_path / "x.fasta")]
        assert main(words) == (0 if residues == 30 else 2)
    assert "x: has 33 tokens with special ones, but the model takes at most 32" in capsys.readouterr().err


def test_a_mechanism_that_cannot_be_causal(tmp_path: Path, folders: Any, capsys: Any) -> None:
    model = swap_attention(tiny_heads.llama(max_position_embeddings=96), "linformer", rank=4, max_length=96)
    model.save_pretrained(tmp_path / "x")
    tiny_folders.letters(front=True, bos_token="<s>").save_pretrained(tmp_path / "x")
    assert complaint(["generate", tmp_path / "x", "--prompt", "a"], capsys) == (
        f"{tmp_path / 'x'}: model.layers.0.self_attn.subquad_attention is linformer, which has no state to go on from, "
        "so the model cannot generate; convert it with mechanisms that have one"
    )


def test_help_says_how_files_are_read(capsys: Any) -> None:
    for command in ("score", "embed", "diagnose"):
        assert main([command, "--help"]) == 0
        shown = " ".join("".join(c if c.isascii() else " " for c in capsys.readouterr().out).split())
        assert "FASTA if the tokens of the model are single residues (ESM, protein BERT)" in shown
