"""Spectra of attention matrices that are known, of our models, of Hugging Face's, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer, GPT2Config, GPT2Model, T5Config, T5Model

import subquad
from subquad import errors
from subquad.cli import main
from subquad.data import load_proteins, read_fasta
from subquad.diagnostics import SpectrumResult, spectrum
from subquad.diagnostics.matrices import attention_matrices, shuffled_rows
from subquad.models import SubquadForCausalLM, SubquadModel
from subquad.nn import Block, Context
from tiny_models import TINY_RUN, make, random_ids


class Known(nn.Module):
    """One layer whose queries and keys are given: whatever the ids, logits are `size` times the identity."""

    def __init__(self, size: float, causal: bool = False) -> None:
        super().__init__()
        self.size, self.causal = size, causal
        self.mechanism = subquad.SoftmaxAttention(16, scale=1.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.eye(16, dtype=torch.float64)[None, None, : input_ids.shape[1]] * self.size**0.5
        return self.mechanism(x, x, x, causal=self.causal)


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, intermediate_size=16, initializer_range=0.5, **options)).double().eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=4, initializer_range=0.5)).double().eval()


# Known answers --------------------------------------------------------------------------------------------------------


def test_uniform_attention_has_rank_one() -> None:
    result = spectrum(Known(0.0), torch.zeros(2, 12, dtype=torch.long))
    assert result.cumulative.shape == (1, 1, 12)
    assert torch.allclose(result.cumulative, torch.ones(1, 1, 12, dtype=torch.float64))
    assert result.rank_for(0.999).tolist() == [[1]]


def test_identity_has_full_rank() -> None:
    result = spectrum(Known(200.0), torch.zeros(1, 12, dtype=torch.long))
    assert torch.allclose(result.cumulative[0, 0], torch.arange(1, 13).double() / 12)
    assert result.rank_for(0.5).tolist() == [[6]]
    assert result.rank_for(1.0).tolist() == [[12]]
    assert result.captured(3).item() == pytest.approx(0.25)


def test_singular_values_are_those_of_the_matrix() -> None:
    """I + a multiple of ones: its singular values can be written down."""
    size, n = 2.0, 10
    diagonal, other = np.exp(size), 1.0
    values = np.array([diagonal + (n - 1) * other, *[diagonal - other] * (n - 1)])
    result = spectrum(Known(size), torch.zeros(1, n, dtype=torch.long))
    assert np.allclose(result.cumulative[0, 0].numpy(), values.cumsum() / values.sum())


# Models ---------------------------------------------------------------------------------------------------------------


def shares(matrix: Tensor) -> Tensor:
    sums = torch.linalg.svdvals(matrix).cumsum(-1)
    return sums / sums[..., -1:]


@pytest.mark.parametrize("attention", ["softmax", "favor", "linear", "strided"])
@pytest.mark.parametrize("kind", [SubquadModel, SubquadForCausalLM])
def test_our_models(kind: Any, attention: str) -> None:
    """The matrices that reproduce the layer's output, averaged over the batch."""
    model = make(kind, attention=attention, causal=kind is SubquadForCausalLM)
    ids = random_ids(3, 11)
    result = spectrum(model, ids)
    assert result.cumulative.shape == (2, 4, 11)
    assert (result.sequences, result.length) == (3, 11)
    want = torch.stack(
        [torch.stack([shares(m) for m in attention_matrices(model, {"input_ids": x[None]})]) for x in ids]
    )
    assert torch.allclose(result.cumulative, want.mean(0))
    for matrix in attention_matrices(model, {"input_ids": ids[:1]}):
        assert bool(matrix.triu(1).any()) == (kind is SubquadModel)


def test_the_matrix_is_the_layers() -> None:
    block = Block(16, 4, attention="favor", num_key_value_heads=2).double()
    x, context = torch.randn(1, 9, 16, dtype=torch.float64), Context(causal=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return block(inputs_embeds, context)

    (matrix,) = attention_matrices(Model(), {"inputs_embeds": x})
    calls: list[Tensor] = []
    block.attention.mechanism.register_forward_pre_hook(lambda _, inputs: calls.extend(inputs))
    block(x, context)
    q, k, v = calls
    want = block.attention.mechanism(q, k, v, causal=True)
    assert torch.allclose(matrix @ v[0].repeat_interleave(2, 0), want[0])


@pytest.mark.parametrize("make_model", [bert, gpt2])
@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_hugging_face_models(make_model: Callable, before: str) -> None:
    model = make_model()
    model.set_attn_implementation(before)
    model.train()
    ids = random_ids(2, 9)
    result = spectrum(model, {"input_ids": ids})
    assert (model.config._attn_implementation, model.training) == (before, True)
    model.eval()
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True).attentions
    want = torch.stack([shares(weights).mean(0) for weights in out])
    assert torch.allclose(result.cumulative, want, atol=1e-6)


@pytest.mark.parametrize("make_model", [bert, gpt2, lambda: make(SubquadModel, causal=False)])
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(make_model: Callable, left: bool) -> None:
    model, ids = make_model(), random_ids(2, 14)
    mask = torch.zeros(2, 14, dtype=torch.long)
    mask[:, slice(5, 14) if left else slice(0, 9)] = 1
    want = spectrum(model, ids[mask.bool()].view(2, 9))
    got = spectrum(model, {"input_ids": ids, "attention_mask": mask})
    assert torch.allclose(got.cumulative, want.cumulative)
    shorter = spectrum(model, {"input_ids": ids, "attention_mask": mask}, length=6)
    assert torch.allclose(shorter.cumulative, spectrum(model, ids[mask.bool()].view(2, 9)[:, :6]).cumulative)


def test_shuffled_rows_keep_their_weights_and_their_places() -> None:
    matrix = torch.rand(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril()
    got = shuffled_rows(matrix, 3)
    assert torch.equal(got != 0, matrix != 0)
    assert torch.allclose(got.sort(-1).values, matrix.sort(-1).values)
    assert not torch.equal(got, matrix)
    assert torch.equal(got, shuffled_rows(matrix, 3))
    low_rank = spectrum(bert(), random_ids(1, 16))
    assert not torch.equal(low_rank.cumulative, spectrum(bert(), random_ids(1, 16), shuffle=True).cumulative)


# Files and the command ------------------------------------------------------------------------------------------------


def test_saved_and_plotted(tmp_path: Path) -> None:
    result = spectrum(bert(), random_ids(2, 9))
    result.save(tmp_path / "spectrum.json")
    record = json.loads((tmp_path / "spectrum.json").read_text())
    assert (record["length"], record["sequences"]) == (9, 2)
    assert np.allclose(record["cumulative"], result.cumulative.numpy(), atol=1e-6)
    for name, control in (("a.png", None), ("b.svg", result)):
        result.plot(tmp_path / name, title="a model", control=control)
        assert (tmp_path / name).stat().st_size > 5000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "mine"
    assert main(["train", "protein", "--out", str(out), "--steps", "1", *TINY_RUN]) == 0
    return out


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "some.fasta"
    records = list(read_fasta(Path(str(load_proteins.__globals__["SAMPLE"]))))[:5]
    path.write_text("".join(f">{name}\n{sequence[:150]}\n" for name, sequence in records))
    return path


def test_command_on_a_run(run: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "spectrum.png"
    command = ["spectrum", str(run), str(fasta), "--length", "32", "--num", "2", "--output", str(picture), "--control"]
    assert main(command) == 0
    assert "the first 8 of 32 singular values hold " in capsys.readouterr().err
    assert json.loads(picture.with_suffix(".json").read_text())["sequences"] == 2
    assert picture.stat().st_size > 5000


def test_command_on_a_hugging_face_model(tmp_path: Path) -> None:
    folder, text = tmp_path / "bert", tmp_path / "some.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "it", "goes"]
    bert().save_pretrained(folder)
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    text.write_text("so it goes " * 20)
    command = ["spectrum", str(folder), str(text), "--length", "16", "--output", str(tmp_path / "x.svg")]
    assert main(command) == 0
    record = json.loads((tmp_path / "x.json").read_text())
    assert (record["length"], record["sequences"], len(record["cumulative"])) == (16, 4, 3)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "length": (["--length", "900"], "spectrum: none of 5 sequences has 900 tokens; give a smaller --length"),
    "no length": (["--length", "0"], "--length: must be at least 1, got 0"),
    "num": (["--num", "0"], "--num: must be at least 1, got 0"),
    "suffix": (["--output", "x.txt"], "--output: must end in .png or .svg, got 'x.txt'"),
    "folder": (["--output", "no/x.png"], "--output no/x.png: there is no folder no"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_the_command(
    arguments: list[str], message: str, run: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spectrum", str(run), str(fasta), *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"subquad: error: {message}"


def test_command_without_a_model(tmp_path: Path, fasta: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spectrum", str(tmp_path / "nothing"), str(fasta)]) == 2
    assert "does not exist; give a run folder or a model folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["spectrum", str(tmp_path), str(fasta)]) == 2
    assert "no model can be loaded from it" in capsys.readouterr().err


# Errors ---------------------------------------------------------------------------------------------------------------

ids = random_ids(2, 9)
result = SpectrumResult(torch.rand(2, 3, 9, dtype=torch.float64).cumsum(-1), 1)
ragged = torch.ones(2, 9, dtype=torch.long)
ragged[1, 5:] = 0


def cast(value: object) -> Any:
    return value


def t5() -> Any:
    return T5Model(T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))


class TwoSizes(nn.Module):
    """Layers with different numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = subquad.SoftmaxAttention(4), subquad.SoftmaxAttention(4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.randn(1, 2, input_ids.shape[1], 4)
        return self.one(x, x, x) + self.two(x[:, :1], x[:, :1], x[:, :1])


ERRORS: dict[str, tuple[Callable[[], object], type, str]] = {
    "lengths": (
        lambda: spectrum(bert(), {"input_ids": ids, "attention_mask": ragged}),
        errors.ShapeError,
        "spectrum: sequences must have one length, got 5 to 9 real tokens; give length to take the first ones of each",
    ),
    "too long": (
        lambda: spectrum(bert(), {"input_ids": ids, "attention_mask": ragged}, length=6),
        errors.ShapeError,
        "spectrum: length=6, but a sequence has 5 real tokens; leave it out",
    ),
    "no length": (
        lambda: spectrum(bert(), ids, length=0),
        errors.ConfigError,
        "spectrum: length must be a whole number of at least 1, got 0",
    ),
    "mask": (
        lambda: spectrum(bert(), {"input_ids": ids, "attention_mask": 3 * ragged}),
        errors.MaskError,
        "spectrum: attention_mask must be [batch, length], 1 for real tokens and 0 for padding",
    ),
    "no ids": (
        lambda: spectrum(bert(), {"labels": ids}),
        errors.ConfigError,
        "spectrum: the batch needs input_ids or inputs_embeds, got labels",
    ),
    "a list": (
        lambda: spectrum(bert(), {"input_ids": cast([[1, 2]])}),
        errors.DtypeError,
        "spectrum: input_ids of the batch must be a torch.Tensor, got list",
    ),
    "one sequence": (
        lambda: spectrum(bert(), ids[0]),
        errors.ShapeError,
        "spectrum: every input must be [batch, length] like input_ids, none empty, got input_ids [9]",
    ),
    "no attention": (
        lambda: spectrum(nn.Linear(3, 3), ids),
        errors.ConfigError,
        "spectrum: Linear has no subquad mechanism and is no Hugging Face model, so there is no attention to look at",
    ),
    "encoder-decoder": (
        lambda: spectrum(t5(), {"input_ids": ids, "decoder_input_ids": ids}),
        errors.ConfigError,
        "spectrum: T5Model returns no attention weights; of an encoder-decoder give one half, such as "
        "model.get_encoder()",
    ),
    "different layers": (
        lambda: spectrum(TwoSizes(), ids),
        errors.ShapeError,
        "spectrum: all layers must have matrices of one shape [heads, n, n], got [(1, 9, 9), (2, 9, 9)]",
    ),
    "rank": (
        lambda: result.captured(10),
        errors.ConfigError,
        "spectrum: rank must be at most the length of 9, got 10",
    ),
    "share": (
        lambda: result.rank_for(1.5),
        errors.ConfigError,
        "spectrum: share must be above 0 and at most 1, got 1.5",
    ),
    "folder": (
        lambda: result.save("no/x.json"),
        errors.DataError,
        "no/x.json: cannot be written (No such file or directory)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], object], kind: type, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (kind, message)


def test_a_picture_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError, match="cannot be written"):
        result.plot(tmp_path / "x.nothing")
