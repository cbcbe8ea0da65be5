"""The Hugging Face models, for every mechanism."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from subquad import MECHANISMS
from subquad.data import protein_tokenizer
from subquad.mechanism import RandomFeatures
from subquad.models import (
    SubquadCache,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
    embeddings,
    log_likelihoods,
    pseudo_log_likelihoods,
)
from subquad.models import scoring as scoring_module
from subquad.models.heads import pool
from subquad.testing import assert_close
from tiny_models import NARROW, NEEDED, SMALL, make, random_ids

MIXTURES: dict[str, dict[str, Any]] = {
    **{m.name: {"attention": m.name} for m in MECHANISMS if m.supports_state and m.name not in NEEDED},
    **{
        f"{m.name}-narrow": {"attention": m.name, "attention_options": NARROW[m.name]}
        for m in MECHANISMS
        if m.supports_state and m.name in NARROW
    },
    "strided-fixed": {"attention": "strided", "attention_options": {"stride": 4, "pattern": "fixed", "summary": 1}},
    "clustered-performer": {
        "attention": "cluster",
        "attention_options": {"num_clusters": 3, "inside": "favor", "num_features": 8},
        "reversible": True,
    },
    "favor-paper": {"attention": "favor", "attention_options": {"num_features": 8, "near": 0, "sinks": 0}},
    "layers": {"attention": ["softmax", "favor"], "attention_options": [{}, {"num_features": 8, "near": 4}]},
    "reversible": {"attention": "favor", "attention_options": {"near": 4}, "reversible": True},
    "sinusoidal": {"attention": "linear", "positions": "sinusoidal", "mlp": "plain", "tie_word_embeddings": False},
    "learned": {"attention": "favor", "positions": "learned", "max_position_embeddings": 64},
}
MIXTURES |= {
    f"{name}-convolved": {**options, "short_conv": 3, "stir": True}
    for name, options in MIXTURES.items()
    if name.endswith("-narrow") or name in ("identity", "softmax", "linear", "favor-paper", "layers", "reversible")
}
MIXTURES["normalised"] = {"attention": "favor", "attention_options": {"near": 4}, "short_conv": 2, "qk_norm": True}
causal_models = pytest.mark.parametrize("options", MIXTURES.values(), ids=MIXTURES)


def language_model(attention: str) -> tuple[Any, Any]:
    """Model and Auto class: causal, if the mechanism can be."""
    causal = next(m.supports_causal for m in MECHANISMS if m.name == attention)
    return (SubquadForCausalLM, AutoModelForCausalLM) if causal else (SubquadForMaskedLM, AutoModelForMaskedLM)


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    width = max(lengths)
    rows = [random_ids(8, width)[i, :length] for i, length in enumerate(lengths)]
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    return ids, (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long(), rows


# Generation -----------------------------------------------------------------------------------------------------------


@causal_models
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_generation_with_cache_is_without(options: dict[str, Any], search: dict[str, Any]) -> None:
    model = make(**options)
    ids, mask, rows = left_padded([11, 6, 1])
    common = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **search}
    cached, plain = (model.generate(ids, attention_mask=mask, use_cache=use, **common) for use in (True, False))
    assert torch.equal(cached, plain)
    for row, alone in enumerate(rows):
        copies = search.get("num_return_sequences", 1)
        wanted = model.generate(alone[None], attention_mask=torch.ones(1, len(alone)).long(), **common)
        assert torch.equal(cached[row * copies : (row + 1) * copies, 11:], wanted[:, len(alone) :])


@causal_models
def test_logits_piece_by_piece_are_those_of_the_whole(options: dict[str, Any]) -> None:
    model = make(**options)
    ids, mask, _ = left_padded([20, 13])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for cuts in ([0, 20], [0, 1, 2, 9, 20], [0, 7, 8, 16, 17, 20]):
            cache, pieces = SubquadCache(2), []
            for begin, end in pairwise(cuts):
                seen = mask[:, :end] if end % 2 else mask[:, begin:end]  # with or without the past: both are understood
                out = model(ids[:, begin:end], attention_mask=seen, past_key_values=cache, use_cache=True)
                pieces.append(out.logits)
            real = mask.bool()
            assert_close(torch.cat(pieces, 1)[real], whole[real], 1e-9)
            assert cache.get_seq_length() == 20


@causal_models
def test_padding_anywhere_changes_nothing(options: dict[str, Any]) -> None:
    model, ids = make(**options), random_ids(1, 10)
    alone = model(ids).logits[0]
    places = torch.tensor([1, 2, 3, 5, 6, 8, 9, 10, 12, 13])
    padded = torch.zeros(2, 15, dtype=torch.long)
    padded[0, places], padded[1] = ids[0], random_ids(15)
    mask = torch.ones(2, 15)
    mask[0] = torch.zeros(15).index_fill(0, places, 1)
    assert_close(model(padded, attention_mask=mask).logits[0, places], alone, 1e-9)


@causal_models
def test_nothing_leaks_from_the_future(options: dict[str, Any]) -> None:
    model, ids = make(**options), random_ids(1, 30)
    other = ids.clone()
    other[0, 17:] = (other[0, 17:] + 3) % 20 + 2
    assert_close(model(other).logits[:, :17], model(ids).logits[:, :17], 1e-9)
    assert (
        not torch.allclose(model(other).logits[:, 17:], model(ids).logits[:, 17:]) or options["attention"] == "identity"
    )


def test_cache_does_not_grow() -> None:
    for name in ("favor", "linear"):
        model = make(attention=name, dtype=torch.float32)
        sizes = [model(random_ids(1, n), use_cache=True).past_key_values.nbytes() for n in (5, 300)]
        assert sizes[0] == sizes[1] > 0


def test_cache_is_not_written_to() -> None:
    model = make(attention="favor")
    with torch.no_grad():
        cache = model(random_ids(2, 7), use_cache=True).past_key_values
    state, before = cache.layers[0].state, copy.deepcopy(cache.layers[0].state)
    model(random_ids(2, 1), past_key_values=cache, use_cache=True)
    assert torch.equal(state.recent, before.recent)
    assert all(torch.equal(a, b) for a, b in zip(state.attention, before.attention, strict=True))


def test_cache_repeats_and_selects() -> None:
    model, ids = make(attention="favor"), random_ids(2, 7)
    cache = model(ids, use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    got = model(ids[[1, 0], :1], past_key_values=cache, use_cache=True).logits
    wanted = model(torch.cat([ids[[1, 0]], ids[[1, 0], :1]], 1)).logits[:, -1:]
    assert_close(got, wanted, 1e-9)
    cache.reset()
    assert_close(model(ids, past_key_values=cache, use_cache=True).logits, model(ids).logits, 1e-9)


def test_the_cache_says_how_long_a_mask_must_be() -> None:
    cache = SubquadCache(2)
    assert cache.layers[0].get_max_length() == -1  # there is no end
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    make(attention="favor")(random_ids(2, 7), past_key_values=cache, use_cache=True)
    for layer in (0, 1):
        assert cache.get_mask_sizes(3, layer) == (10, 0)  # all tokens so far and the new ones, from the first on


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [m.name for m in MECHANISMS])
def test_saved_models_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    kind, auto = language_model(name)
    options = {"attention": name, "attention_options": NEEDED.get(name)}
    model, ids = make(kind, dtype=torch.float32, **options), random_ids(2, 40)
    model.redraw(7)  # features that no constructor would draw
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = auto.from_pretrained(tmp_path)
    assert type(again) is kind
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).attention == name
    base = AutoModel.from_pretrained(tmp_path)
    assert base.config.causal is (kind is SubquadForCausalLM)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_random_features_stay_float32(tmp_path: Path) -> None:
    model = make(attention="favor", dtype=torch.float32)
    model.redraw(3)
    model.save_pretrained(tmp_path)
    features = [m.weight.clone() for m in model.mechanisms()]
    for loaded in (SubquadForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
        assert loaded.lm_head.weight.dtype == torch.bfloat16
        for mechanism, wanted in zip(loaded.mechanisms(), features, strict=True):
            assert torch.equal(torch.as_tensor(mechanism.weight), wanted)
        assert loaded(random_ids(1, 90)).logits.dtype == torch.bfloat16


def test_auto_classes_know_every_head() -> None:
    config = SubquadConfig(**SMALL, num_hidden_layers=1)
    for auto, kind in (
        (AutoModel, SubquadModel),
        (AutoModelForMaskedLM, SubquadForMaskedLM),
        (AutoModelForSequenceClassification, SubquadForSequenceClassification),
        (AutoModelForTokenClassification, SubquadForTokenClassification),
    ):
        assert type(auto.from_config(config)) is kind


def test_layers_and_heads_have_features_of_their_own() -> None:
    model = make(attention="favor", dtype=torch.float32)
    drawn = [
        matrix
        for m in model.mechanisms()
        if isinstance(m, RandomFeatures) and m.weight is not None
        for matrix in m.weight
    ]
    assert len(drawn) == 4  # two layers, two key heads
    assert len({tuple(matrix.flatten().tolist()) for matrix in drawn}) == 4
    assert make(attention="linear").redraw(1) == 0


# Heads, losses, gradients ---------------------------------------------------------------------------------------------


def test_losses() -> None:
    ids = random_ids(2, 9)
    model = make()
    labels = ids.masked_fill(ids % 3 == 0, -100)
    logits = model(ids, labels=labels).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(model(ids, labels=labels).loss, wanted, 1e-6)
    items = (labels[:, 1:] != -100).sum()
    assert_close(model(ids, labels=labels, num_items_in_batch=2 * items).loss, wanted / 2, 1e-6)
    masked = make(SubquadForMaskedLM)
    logits = masked(ids, labels=labels).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_close(masked(ids, labels=labels).loss, wanted, 1e-6)


@pytest.mark.parametrize("causal", [None, True])
def test_classification_ignores_padding(causal: bool | None) -> None:
    model = make(SubquadForSequenceClassification, causal=causal, num_labels=3)
    ids, mask, rows = left_padded([9, 4])
    out = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    alone = torch.cat([model(row[None]).logits for row in rows])
    assert_close(out.logits, alone, 1e-9)
    assert_close(out.loss, torch.nn.functional.cross_entropy(alone, torch.tensor([0, 2])), 1e-6)
    right = torch.cat([rows[1], torch.zeros(5, dtype=torch.long)])[None]
    assert_close(model(right, attention_mask=(torch.arange(9) < 4).long()[None]).logits[0], alone[1], 1e-9)


def test_pooling() -> None:
    """Of one real token, of some between padding, of none, and of all."""
    hidden = torch.arange(12.0).view(4, 3, 1)
    mask = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]])
    assert pool(hidden, mask, last=True)[[0, 1, 3], 0].tolist() == [0, 5, 11]
    assert pool(hidden, mask, last=False)[:, 0].tolist() == [0, 4.5, 0, 10]
    assert pool(hidden, None, last=True)[:, 0].tolist() == [2, 5, 8, 11]
    assert pool(hidden, None, last=False)[:, 0].tolist() == [1, 4, 7, 10]


def test_token_classification() -> None:
    model, ids = make(SubquadForTokenClassification, num_labels=5), random_ids(2, 6)
    labels = torch.tensor([[0, 1, 2, 3, 4, -100]] * 2)
    out = model(ids, labels=labels)
    assert out.logits.shape == (2, 6, 5)
    assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten()), 1e-6)


@pytest.mark.parametrize("name", [m.name for m in MECHANISMS])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    ids, grads = random_ids(2, 20), []
    for checkpointing in (False, True):
        options = {"attention": name, "attention_options": NARROW.get(name, {})}
        model = make(language_model(name)[0], **options, dropout=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for got, wanted in zip(*grads, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(got, wanted)


def test_every_parameter_learns() -> None:
    variants: list[dict[str, Any]] = [{"attention": "favor"}, {"mlp": "plain"}, {"reversible": True}]
    for options in variants:
        model, ids = make(**options).train(), random_ids(2, 20)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_hidden_states_and_embeddings() -> None:
    model, ids = make(SubquadModel), random_ids(1, 6)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    assert torch.equal(model(inputs_embeds=model.embed_tokens(ids)).last_hidden_state, out.last_hidden_state)
    assert torch.equal(model(ids, return_dict=False)[0], out.last_hidden_state)
    assert torch.equal(model(ids, position_ids=torch.arange(6)[None]).last_hidden_state, out.last_hidden_state)


@pytest.mark.parametrize(
    "kind",
    [SubquadForCausalLM, SubquadForMaskedLM, SubquadForSequenceClassification, SubquadForTokenClassification],
    ids=lambda kind: kind.__name__,
)
def test_every_head_trains_with_the_trainer(kind: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    ids = random_ids(4, 6)
    labels: Any = {SubquadForSequenceClassification: [0, 1, 1, 0], SubquadForTokenClassification: ids % 2}.get(
        kind, ids
    )
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    options: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=2, **options)
    trainer = Trainer(make(kind, dtype=torch.float32), arguments, train_dataset=data)  # pyright: ignore
    assert trainer.train().global_step == 2


def test_pipelines() -> None:
    tokenizer = protein_tokenizer()
    options = {"vocab_size": len(tokenizer), "dtype": torch.float32}
    causal, masked = make(**options), make(SubquadForMaskedLM, **options)
    text = pipeline("text-generation", model=causal, tokenizer=tokenizer)("MKV", max_new_tokens=5, do_sample=False)
    assert text[0]["generated_text"].startswith("MKV")
    assert len(pipeline("fill-mask", model=masked, tokenizer=tokenizer)("MK<mask>V")) == 5
    classifier = make(SubquadForSequenceClassification, **options)
    labels = pipeline("text-classification", model=classifier, tokenizer=tokenizer)(["MKV", "MKVVVV"])
    assert {label["label"] for label in labels} <= {"LABEL_0", "LABEL_1"}
    vectors = pipeline("feature-extraction", model=masked.model, tokenizer=tokenizer)("MKV")
    assert len(vectors[0]) == 4  # the separator and three residues


# Scores ---------------------------------------------------------------------------------------------------------------


def naive_scores(model: SubquadForCausalLM, ids: Tensor) -> Tensor:
    logits = model(torch.cat([torch.tensor([1]), ids])[None]).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


@causal_models
def test_log_likelihoods(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(**options)
    sequences = [random_ids(n) for n in (3, 31, 1, 12, 30)]
    done: list[int] = []
    with torch.no_grad():
        wanted = [naive_scores(model, ids) for ids in sequences]
    for piece in (4096, 7):  # whole, and in pieces with states in between
        monkeypatch.setattr(scoring_module, "PIECE", piece)
        for got, want in zip(log_likelihoods(model, sequences, start=1, progress=done.append), wanted, strict=True):
            assert_close(got, want, 1e-5)
    assert sum(done) == 2 * sum(map(len, sequences))


def test_pseudo_log_likelihoods(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(SubquadForMaskedLM), random_ids(11)
    exact = pseudo_log_likelihoods(model, [ids], start=1, mask=2, passes=None)[0]
    for place in range(11):
        hidden = torch.cat([torch.tensor([1]), ids])[None]
        hidden[0, 1 + place] = 2
        wanted = model(hidden).logits[0, 1 + place].float().log_softmax(-1)[ids[place]]
        assert_close(exact[place], wanted, 1e-5)
    done: list[int] = []
    few = pseudo_log_likelihoods(model, [ids, ids[:2]], start=1, mask=2, passes=4, progress=done.append)
    assert sum(done) == 13
    for small in (1, 30):  # batches of one row, of a few
        monkeypatch.setattr(scoring_module, "BATCH_TOKENS", small)
        again = pseudo_log_likelihoods(model, [ids, ids[:2]], start=1, mask=2, passes=4)
        assert_close(torch.cat(again), torch.cat(few), 1e-5)
    assert [len(scores) for scores in few] == [11, 2]
    assert torch.isfinite(torch.cat(few)).all()
    assert_close(few[1], pseudo_log_likelihoods(model, [ids[:2]], start=1, mask=2, passes=None)[0], 1e-6)


def test_embeddings_do_not_depend_on_the_batch() -> None:
    model, sequences = make(SubquadModel), [random_ids(n) for n in (3, 31, 12)]
    tokens = embeddings(model, sequences, start=1, mean=False)
    means = embeddings(model, sequences, start=1)
    for ids, vectors, mean in zip(sequences, tokens, means, strict=True):
        hidden = model(torch.cat([torch.tensor([1]), ids])[None]).last_hidden_state[0, 1:].float()
        assert_close(vectors, hidden, 1e-5)
        assert_close(mean, hidden.mean(0), 1e-5)
