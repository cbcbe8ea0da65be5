"""Sequences, splits and samples."""

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad import errors
from subquad.data import (
    Collator,
    Corpus,
    CorpusWriter,
    Crops,
    Images,
    Windows,
    byte_tokenizer,
    encode,
    hub_texts,
    images_corpus,
    load_images,
    load_proteins,
    load_text,
    of_tokenizer,
    protein_tokenizer,
    read_fasta,
    texts_corpus,
    unigram_baseline,
)
from subquad.data.vocabulary import AMBIGUOUS, AMINO_ACIDS, BYTES, GAP, PROTEIN

LETTERS = AMINO_ACIDS + AMBIGUOUS + GAP


def corpus_of(lengths: list[int], seed: int = 0) -> Corpus:
    random = np.random.default_rng(seed)
    return corpus_from([random.integers(4, 24, length).astype(np.uint8) for length in lengths])


def corpus_from(sequences: list[np.ndarray]) -> Corpus:
    with CorpusWriter(PROTEIN, "protein") as writer:
        for sequence in sequences:
            writer.add(sequence)
        return writer.finish()


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_protein_tokenizer_and_table_agree() -> None:
    tokenizer = protein_tokenizer()
    for text in (LETTERS, LETTERS.lower(), "MKV"):
        assert tokenizer(text)["input_ids"] == [1, *encode(text).tolist()]
    assert tokenizer.decode(encode(LETTERS)) == LETTERS
    assert len(tokenizer) == PROTEIN.size
    assert tokenizer("MK <mask>\nV")["input_ids"] == [1, 14, 12, 2, 21]
    assert tokenizer("M1")["input_ids"] == [1, 14, 3]
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id] == [
        0,
        1,
        1,
        2,
    ]


def test_byte_tokenizer_is_bytes() -> None:
    tokenizer, every = byte_tokenizer(), bytes(range(256)).decode("latin-1")
    for text in ("plain", "naïve ☃ text\n\t", every):
        ids = tokenizer(text)["input_ids"][1:]
        assert ids == [byte + 4 for byte in text.encode()]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == BYTES.size


def test_tokenizers_survive_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for number, tokenizer in enumerate((protein_tokenizer(), byte_tokenizer())):
        tokenizer.save_pretrained(tmp_path / str(number))
        again = AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert again("MKV")["input_ids"] == tokenizer("MKV")["input_ids"]
        assert again.padding_side == "left"


# Files ----------------------------------------------------------------------------------------------------------------


def test_fasta_plain_and_compressed(tmp_path: Path) -> None:
    text = "\n>one first record\nMKV\nlla\n>two\nACD*\n\n"
    (tmp_path / "a.fasta").write_text(text)
    with gzip.open(tmp_path / "b.dat", "wt") as file:  # what counts is the content, not the name
        file.write(text)
    for name in ("a.fasta", "b.dat"):
        assert list(read_fasta(tmp_path / name)) == [("one", "MKVlla"), ("two", "ACD*")]
        corpus = load_proteins([tmp_path / name])
        assert [sequence.tolist() for sequence in corpus] == [encode("MKVLLA").tolist(), encode("ACD").tolist()]


def test_the_sample_is_what_its_readme_says() -> None:
    corpus = load_proteins()
    assert len(corpus) == 4000
    assert len(set(corpus.keys.tolist())) == 4000
    assert corpus.num_tokens == 1_815_269


def test_long_files_need_little_memory(tmp_path: Path) -> None:
    """What grows with the file is the bookkeeping of sequences, not their residues."""
    path, residues = tmp_path / "long.fasta", "ACDEFGHIKLMNPQRSTVWY" * 500
    with path.open("w") as file:
        for number in range(2000):
            file.write(f">{number}\n{residues}\n")
    size = path.stat().st_size
    load_proteins()  # what is imported on the way
    tracemalloc.start()
    corpus = load_proteins([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 20e6
    assert corpus.num_tokens == 2000 * 10_000
    assert peak < size / 20


def test_text_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("zweite")
    (tmp_path / "deep" / "a.md").write_text("é")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty").write_text("")
    corpus = load_text([tmp_path])
    assert [bytes((sequence - 4).astype(np.uint8)).decode() for sequence in corpus] == ["zweite", "é"]
    tokenizer = protein_tokenizer()
    (tmp_path / "p.txt").write_text("MKV\nACD\n")
    tokens = load_text([tmp_path / "p.txt"], tokenizer)
    assert tokens[0].tolist() == encode("MKVACD").tolist()
    assert tokens.vocabulary == of_tokenizer(tokenizer)


def test_images_of_every_format(tmp_path: Path) -> None:
    from PIL import Image

    grey = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4) * 10
    idx = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 4) + grey.tobytes()
    (tmp_path / "images-idx3-ubyte").write_bytes(idx)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx))
    np.savez(tmp_path / "a.npz", images=grey, labels=np.zeros(2))
    (tmp_path / "png").mkdir()
    for number, image in enumerate(grey):
        Image.fromarray(image).save(tmp_path / "png" / f"{number}.png")
    for name in ("images-idx3-ubyte", "packed.gz", "a.npz", "png"):
        corpus = load_images(tmp_path / name)
        assert corpus.image_shape == (3, 4)
        assert np.array_equal(np.stack(list(corpus)) - 4, grey.reshape(2, 12))
    coarse = load_images(tmp_path / "a.npz", levels=4)
    assert np.array_equal(np.stack(list(coarse)) - 4, grey.reshape(2, 12) // 64)
    colour = np.arange(2 * 2 * 2 * 3).reshape(2, 2, 2, 3)
    assert images_corpus(colour, levels=24).image_shape == (2, 2, 3)


def test_hub_datasets(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n')
    corpus = texts_corpus(hub_texts(f"hf:{tmp_path}"))
    assert [bytes((sequence - 4).astype(np.uint8)) for sequence in corpus] == [b"one", b"two"]
    with pytest.raises(errors.DataError, match="no text column 'txt' \\(did you mean 'text'\\?\\); columns: text"):
        hub_texts(f"hf:{tmp_path}:txt")
    with pytest.raises(errors.DataError, match="hf:no/such-dataset: cannot be loaded"):
        hub_texts("hf:no/such-dataset")


# Splits ---------------------------------------------------------------------------------------------------------------


def test_split_is_by_content() -> None:
    corpus = corpus_of([50] * 400)
    train, held_out = corpus_from([*corpus, *corpus]).split(0.1)
    sides = [{bytes(sequence) for sequence in part} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    assert len(train) + len(held_out) == 800
    assert 40 < len(held_out) < 140
    shuffled = corpus.select(np.random.default_rng(1).permutation(400)).split(0.1)[1]
    assert {bytes(s) for s in shuffled} == sides[1]


def test_split_of_few_sequences_holds_out_their_ends() -> None:
    corpus = corpus_of([100, 1, 40])
    train, held_out = corpus.split(0.1)
    assert [len(s) for s in train] == [90, 36]
    assert [len(s) for s in held_out] == [10, 1, 4]
    assert np.array_equal(np.concatenate([train[0], held_out[0]]), corpus[0])


def test_images_are_held_out_whole() -> None:
    train, held_out = images_corpus(np.arange(5 * 9).reshape(5, 3, 3) % 7, levels=7).split(0.05)
    assert {len(image) for image in [*train, *held_out]} == {9}
    assert (len(train), len(held_out)) == (4, 1)


def test_byte_order_marks_and_unicode_names(tmp_path: Path) -> None:
    (tmp_path / "bom.fasta").write_bytes("\ufeff>é one\r\nMKV\r\n".encode())
    assert list(read_fasta(tmp_path / "bom.fasta")) == [("é", "MKV")]


def test_random_replacements_are_no_specials() -> None:
    vocabulary = of_tokenizer(byte_tokenizer())
    assert vocabulary.ordinary == tuple(range(4, 260))


def test_no_window_crosses_the_split() -> None:
    corpus = corpus_of([30] * 100)
    train, held_out = corpus.split(0.2)
    known = {bytes(s[i : i + 8]) for s in held_out for i in range(len(s) - 7)}
    windows = Windows(train, 64, objective="causal", seed=0)
    seen = {bytes(w[i : i + 8]) for w in map(windows.tokens, range(len(windows))) for i in range(57)}
    assert not known & seen


# Samples --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 7, 31, 200])
def test_windows_cover_every_epoch_exactly_once(length: int) -> None:
    corpus = corpus_of([5, 1, 17, 40, 3, 3, 29])
    windows = Windows(corpus, length, objective="causal", seed=3) if length < 100 else None
    if windows is None:
        with pytest.raises(errors.DataError, match="a window of 200 tokens is longer than the data, 105 with"):
            Windows(corpus, length, objective="causal", seed=3)
        return
    orders = []
    for epoch in range(3):
        made = [windows.tokens(epoch * windows.per_epoch + i) for i in range(windows.per_epoch)]
        order = np.random.default_rng([3, 0, epoch]).permutation(7)
        wanted = np.concatenate([[*corpus[i], 1] for i in order])
        assert np.array_equal(np.concatenate(made), wanted[: len(windows) * length])
        orders.append(tuple(order))
    assert len(set(orders)) == 3


def test_crops_stay_inside_one_sequence() -> None:
    corpus = corpus_of([5, 30])
    crops = Crops(corpus, 10, objective="causal", seed=0)
    starts = set()
    for index in range(60):
        tokens = crops.tokens(index)
        whole = next(np.array([1, *s, 1]) for s in corpus if len(s) == (5 if len(tokens) == 7 else 30))
        places = [i for i in range(len(whole) - len(tokens) + 1) if np.array_equal(whole[i : i + len(tokens)], tokens)]
        assert places
        starts.add(places[0])
    assert {0, 22} <= starts  # both ends are reached
    assert len(starts) > 10


@pytest.mark.parametrize("kind", [Windows, Crops])
@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_samples_are_functions_of_seed_and_index(kind, objective: str) -> None:
    corpus = corpus_of([20] * 30)
    one, two, other = (kind(corpus, 16, objective=objective, seed=seed, total=200) for seed in (1, 1, 2))
    order = np.random.default_rng(0).permutation(200)
    np.random.seed(3)
    torch.manual_seed(3)
    shuffled = {int(i): one[int(i)] for i in order}
    differ = 0
    for index in range(200):
        for name in ("input_ids", "labels"):
            assert torch.equal(two[index][name], shuffled[index][name])
        differ += not torch.equal(other[index]["input_ids"], shuffled[index]["input_ids"])
    assert differ > 150


def test_masking_is_berts() -> None:
    corpus = corpus_of([4000] * 30)
    windows = Windows(corpus, 4096, objective="masked", seed=0)
    inputs, labels = (torch.cat([windows[i][name] for i in range(20)]) for name in ("input_ids", "labels"))
    tokens = torch.from_numpy(np.concatenate([windows.tokens(i) for i in range(20)]).astype(np.int64))
    asked = labels != -100
    assert torch.equal(labels[asked], tokens[asked])
    assert torch.equal(inputs[~asked], tokens[~asked])
    assert not asked[tokens == 1].any()  # separators are never asked for
    share = asked.double().mean().item()
    hidden = (inputs[asked] == 2).double().mean().item()
    kept = (inputs[asked] == tokens[asked]).double().mean().item()
    assert abs(share - 0.15) < 0.005
    assert abs(hidden - 0.8) < 0.015
    assert abs(kept - (0.1 + 0.1 / 20)) < 0.015
    assert set(inputs[asked & (inputs != 2)].tolist()) <= set(range(4, 24))


def test_evaluation_hides_every_target() -> None:
    windows = Windows(corpus_of([400] * 30), 512, objective="masked", seed=0, evaluation=True)
    for i in range(5):
        sample = windows[i]
        assert (sample["input_ids"][sample["labels"] != -100] == 2).all()


def test_collator_pads_and_masks() -> None:
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([1, 5, 6], [1])]
    batch = Collator(0)(samples)
    assert batch["input_ids"].tolist() == [[1, 5, 6], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 5, 6], [1, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in Collator(0)(samples[:1])


def test_unigram_baseline() -> None:
    corpus = corpus_from([np.array([4, 4, 4, 5], np.uint8)] * 30)
    windows = Windows(corpus, 10, objective="causal", seed=0)
    counts = {4: 91, 5: 31, 1: 31}
    total = sum(counts.values()) + PROTEIN.size - 3
    labels = np.concatenate([windows.tokens(i)[1:] for i in range(3)])
    wanted = -np.mean([np.log(counts[int(token)] / total) for token in labels])
    baseline = unigram_baseline(corpus, windows, 3)
    assert baseline.loss == pytest.approx(wanted, rel=1e-12)
    assert baseline.accuracy == (labels == 4).mean()


def test_images_are_whole() -> None:
    corpus = images_corpus(np.arange(8).reshape(2, 2, 2), levels=8)
    samples = Images(corpus, objective="causal", seed=0)
    made = {tuple(samples.tokens(i).tolist()) for i in range(2)}
    assert made == {(1, 4, 5, 6, 7), (1, 8, 9, 10, 11)}


# Errors ---------------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def bad_gzip(folder: Path) -> Path:
    return write(
        folder, "cut.gz", gzip.compress(b">a\n" + bytes(np.random.default_rng(0).integers(65, 90, 5000)))[:900]
    )


ERRORS = {
    "missing": (lambda f: load_proteins([f / "x.fasta"]), "x.fasta: no such file"),
    "missing, near": (
        lambda f: write(f, "mine.fasta", ">a\nMK\n") and load_proteins([f / "min.fasta"]),
        "min.fasta: no such file (did you mean 'mine.fasta'?)",
    ),
    "missing images": (lambda f: load_images(f / "x.npz"), "x.npz: no such file"),
    "folder": (lambda f: load_proteins([f]), ": is a folder, a file is needed"),
    "empty": (
        lambda f: load_proteins([write(f, "e.fasta", "\n\n")]),
        "e.fasta: is empty; a FASTA file with at least one sequence is needed",
    ),
    "not fasta": (
        lambda f: load_proteins([write(f, "n.fasta", "MKV\n")]),
        "n.fasta: is not FASTA, its first line must begin with '>', got 'MKV'",
    ),
    "no residues": (
        lambda f: load_proteins([write(f, "r.fasta", ">a\nMK\n>b\n>c\nMK\n")]),
        "r.fasta: b has no residues; remove the record",
    ),
    "no residue": (
        lambda f: load_proteins([write(f, "c.fasta", ">ok\nMK\n>bad\nMK1V\n")]),
        "c.fasta: bad: '1' at position 3 is no amino acid; "
        "allowed are the 20, X B Z U O J, '-' for a gap and a final '*'",
    ),
    "damaged": (
        lambda f: load_proteins([bad_gzip(f)]),
        "cut.gz: compressed data is damaged (Compressed file ended before the end-of-stream marker was reached)",
    ),
    "no text": (lambda f: load_text([f]), ": there is no file to read"),
    "empty text": (lambda f: load_text([write(f, "t.txt", "")]), "t.txt: holds no sequence"),
    "no UTF-8": (
        lambda f: load_text([write(f, "u.txt", b"ab\xff")], byte_tokenizer()),
        "u.txt: is not UTF-8 text (invalid start byte at byte 2); save it as UTF-8, or train on bytes",
    ),
    "no images": (
        lambda f: load_images(write(f, "labels", struct.pack(">4BI", 0, 0, 8, 1, 1) + b"\0")),
        "labels: holds no images; idx files of bytes with 3 or 4 dimensions, npz files and folders of PNG do",
    ),
    "cut images": (
        lambda f: load_images(write(f, "cut", struct.pack(">4B3I", 0, 0, 8, 3, 1, 2, 2) + b"\0")),
        "cut: should hold [1, 2, 2] bytes, got 1; the file is damaged",
    ),
    "image values": (
        lambda _: images_corpus(np.full((1, 2, 2), 9), levels=4),
        "images: values must lie in 0..3, got 9..9",
    ),
    "image type": (
        lambda _: images_corpus(np.zeros((1, 2, 2))),
        "images: must be whole numbers [N, H, W] or [N, H, W, C], got float64 [1, 2, 2]",
    ),
    "levels": (
        lambda _: images_corpus(np.zeros((1, 2, 2), int), levels=9, of=4),
        "images: levels must be at most 4, got 9",
    ),
    "no PNG": (load_images, ": there is no PNG image to read"),
    "copies of one": (
        lambda _: corpus_from([np.array([4, 5], np.uint8)] * 25).split(0.1),
        "validation: the data cannot be split, 0 sequences to train on and 25 held out; "
        "there is too little of it, or all sequences are copies of one",
    ),
    "cut header": (
        lambda f: load_images(write(f, "short", struct.pack(">4BI", 0, 0, 8, 3, 1))),
        "short: cannot be read (unpack requires a buffer of 12 bytes)",
    ),
    "fraction": (lambda _: corpus_of([5]).split(1.5), "validation: the share must lie between 0 and 1, got 1.5"),
    "objective": (
        lambda _: Windows(corpus_of([9]), 4, objective="mlm", seed=0),
        "samples: objective must be one of causal, masked, got 'mlm'",
    ),
    "window": (
        lambda _: Crops(corpus_of([9]), 1, objective="causal", seed=0),
        "samples: window must be a whole number of at least 2, got 1",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, message: str, tmp_path: Path) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call(tmp_path)
    assert str(caught.value).replace(f"{tmp_path}/", "").replace(str(tmp_path), "") == message


def test_npz_and_folder_errors(tmp_path: Path) -> None:
    from PIL import Image

    np.savez(tmp_path / "two.npz", a=np.zeros((1, 2, 2), np.uint8), b=np.zeros((1, 2, 2), np.uint8))
    with pytest.raises(errors.DataError, match="has several arrays \\(a, b\\); call one of them 'images'"):
        load_images(tmp_path / "two.npz")
    np.savez(tmp_path / "none.npz", a=np.zeros(3))
    with pytest.raises(errors.DataError, match="has no array"):
        load_images(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04nonsense")
    with pytest.raises(errors.DataError, match="compressed data is damaged"):
        load_images(tmp_path / "bad.npz")
    for content in (b"some text", (tmp_path / "none.npz").read_bytes()[:40]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(errors.DataError, match=r"bad\.npz: "):
            load_images(tmp_path / "bad.npz")
    (tmp_path / "deep").mkdir()
    Image.fromarray(np.full((2, 2), 300, np.uint16)).save(tmp_path / "deep" / "x.png")
    with pytest.raises(errors.DataError, match="has more than 8 bits per channel"):
        load_images(tmp_path / "deep")
    for name, size in (("a", 2), ("b", 3)):
        Image.fromarray(np.zeros((size, 2), np.uint8)).save(tmp_path / f"{name}.png")
    with pytest.raises(errors.DataError, match=r"b.png: is \[3, 2\], but a.png is \[2, 2\]; all images need one size"):
        load_images(tmp_path)
    (tmp_path / "c.png").write_bytes(b"not a picture")
    (tmp_path / "b.png").unlink()
    with pytest.raises(errors.DataError, match=r"c.png: cannot be read"):
        load_images(tmp_path)
