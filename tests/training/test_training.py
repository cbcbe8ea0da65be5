"""Runs: resumed bit for bit, killed at any moment, refused with one clear error."""

import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from processes import OPTIONS, quiet_train, weights
from subquad import MECHANISMS, errors
from subquad.data import Corpus, load_proteins
from subquad.data.samples import Samples
from subquad.files import remove
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.testing import assert_close
from subquad.training import TrainOptions, make_samples, model_folder, run, train
from subquad.training import checksums as files_module
from subquad.training.callbacks import WatchFeatures, feature_seed
from subquad.training.checkpoints import checkpoints, newest
from subquad.training.checksums import damage, read_record, verify, write_record
from subquad.training.metrics import MetricsFile, plot_losses, token_statistics
from subquad.training.muon import MuonAdamW, orthogonalised, split_parameters
from subquad.training.options import RunRecord
from subquad.training.setup import build_model

HERE = Path(__file__).parents[1]
SHORT = replace(OPTIONS, steps=6, save_every=2, eval_every=6, log_every=1)
KINDS = {
    "favor": SHORT,
    "softmax": replace(SHORT, attention="softmax", attention_options={}, redraw_every=0),
    "linear": replace(SHORT, attention="linear", attention_options={}, redraw_every=0, reversible=True),
    "identity": replace(SHORT, attention="identity", attention_options={}, redraw_every=0, optimizer="adamw"),
    "cluster": replace(SHORT, attention="cluster", attention_options={"num_clusters": 4}, redraw_every=0),
    "reformer": replace(
        SHORT, attention="lsh", attention_options={"num_buckets": 4, "bucket_size": 16}, shared_qk=True, reversible=True
    ),
    "masked crops": replace(SHORT, objective="masked", layout="crops", batch_size=3, accumulate=2),
    "mixed": replace(
        SHORT, attention=["softmax", "favor"], attention_options=[{}, {"near": 16}], gradient_checkpointing=True
    ),
}


def script(*arguments: object, timeout: int = 3600) -> str:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop_at(sample: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """The signal arrives while the given sample is fetched."""
    fetch = Samples.__getitem__

    def fetch_and_stop(self: Samples, index: int):
        if index == sample and len(self) > 3:
            os.kill(os.getpid(), number)
        return fetch(self, index)

    monkeypatch.setattr(Samples, "__getitem__", fetch_and_stop)


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_interrupted_and_resumed_is_uninterrupted(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quiet_train(tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        stop_at(3 * options.batch_size * options.accumulate, patch)
        stopped = quiet_train(tmp_path / "run", options)
    assert stopped.stopped_by == signal.SIGTERM
    assert stopped.step == 3  # the loader fetches one sample ahead
    assert not (tmp_path / "run" / "model").exists()
    resumed = quiet_train(tmp_path / "run", options, resume=True)
    assert (resumed.step, resumed.stopped_by) == (6, None)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert resumed.metrics == whole.metrics
    last = [newest(tmp_path / name / "checkpoints") for name in ("run", "whole")]
    states = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in last if path is not None]
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_seed_changes_everything_and_threads_nothing_else(tmp_path: Path) -> None:
    options = replace(SHORT, steps=2)
    runs = {seed: quiet_train(tmp_path / str(seed), replace(options, seed=seed)) for seed in (0, 1)}
    again = quiet_train(tmp_path / "again", options)
    assert again.metrics == runs[0].metrics
    assert runs[1].metrics != runs[0].metrics


def test_a_finished_run_can_be_resumed(tmp_path: Path) -> None:
    first = quiet_train(tmp_path, SHORT)
    before = weights(tmp_path)
    second = quiet_train(tmp_path, SHORT, resume=True)
    assert second == first  # timings included: nothing was done again
    assert weights(tmp_path) == before


def test_a_run_without_its_model_gets_it_from_the_last_checkpoint(tmp_path: Path) -> None:
    quiet_train(tmp_path, SHORT)
    before = weights(tmp_path)
    remove(tmp_path / "model")
    assert model_folder(tmp_path).name == "checkpoint-6"
    quiet_train(tmp_path, SHORT, resume=True)
    assert weights(tmp_path) == before


def test_a_run_says_what_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(2, monkeypatch)
    told = []
    for resume in (False, True):
        console = Console(record=True, width=500, file=io.StringIO())
        train(load_proteins(), tmp_path, SHORT, console=console, resume=resume)
        told.append([line for line in console.export_text().splitlines() if line.startswith("continuing from ")])
        monkeypatch.undo()
    assert told == [[], [f"continuing from {tmp_path / 'checkpoints' / 'checkpoint-2'}"]]


def test_sigint_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(2, monkeypatch, signal.SIGINT)
    result = quiet_train(tmp_path, SHORT)
    assert (result.stopped_by, result.step) == (signal.SIGINT, 2)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# Kills ----------------------------------------------------------------------------------------------------------------


def test_three_kills(tmp_path: Path) -> None:
    assert script(HERE / "kill_runs.py", 3, 1, tmp_path).startswith("3 kills")


@pytest.mark.full
def test_thirty_kills(tmp_path: Path) -> None:
    assert script(HERE / "kill_runs.py", 30, 2, tmp_path).startswith("30 kills")


def test_a_crash_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    assert script(HERE / "crash_points.py", 14, 16, tmp_path).startswith("2 crashes")


@pytest.mark.full
@pytest.mark.parametrize(("first", "last"), [(1, 30), (30, 60), (60, 90), (90, 115)])
def test_a_crash_at_every_file_operation(first: int, last: int, tmp_path: Path) -> None:
    assert script(HERE / "crash_points.py", first, last, tmp_path).startswith(f"{last - first} crashes")


@pytest.mark.full
def test_a_crash_at_the_last_file_operations(tmp_path: Path) -> None:
    out = script(HERE / "crash_points.py", 115, 135, tmp_path)
    assert 0 < int(out.split()[0]) < 19, out  # the last ones come after the end of the run


# What a run leaves ----------------------------------------------------------------------------------------------------


def test_a_run_folder_holds_what_it_promises(tmp_path: Path) -> None:
    result = quiet_train(tmp_path, SHORT, tensorboard=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "metrics.csv",
        "loss.png",
        "checkpoints",
        "model",
        "summary.json",
        "tensorboard",
    }
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"] == result.metrics
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,epoch,tokens,seconds,loss")
    assert len(rows) == 7  # six steps, one evaluation
    assert list((tmp_path / "tensorboard").iterdir())
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["checkpoint-4", "checkpoint-6"]
    for saved in (tmp_path / "model", tmp_path / "checkpoints" / "checkpoint-6"):
        assert "modeling_subquad.py" in json.loads((saved / "files.json").read_text())
    model = SubquadForCausalLM.from_pretrained(tmp_path / "model")
    samples = make_samples(load_proteins().split(0.05)[1], SHORT)
    totals = torch.zeros(3, dtype=torch.float64)
    for i in range(SHORT.eval_samples):
        batch = {name: tensor[None] for name, tensor in samples[i].items()}
        with torch.no_grad():
            totals += token_statistics(model(batch["input_ids"]).logits, batch["labels"], causal=True).double().sum(0)
    assert result.metrics["eval_loss"] == pytest.approx(float(totals[0] / totals[2]), rel=1e-6)
    assert result.metrics["eval_perplexity"] == pytest.approx(math.exp(result.metrics["eval_loss"]))


def test_statistics_are_sums_over_targets() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, -100, 6]])
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    got = token_statistics(logits, labels, causal=True)
    assert_close(got[:, 0], losses.sum(-1), 1e-6)
    assert got[:, 2].tolist() == [3, 1]
    assert got[:, 1].tolist() == (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum(-1).tolist()
    assert token_statistics(logits, labels, causal=False)[:, 2].tolist() == [4, 2]


def test_metrics_forget_what_comes_after(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2, 3):
        file.append({"step": step})
    with file.path.open("a") as raw:
        raw.write('{"step": 4, "lo')  # cut short by a kill
    assert [record["step"] for record in file.records()] == [1, 2, 3]
    file.rewind(2)
    assert [record["step"] for record in file.records()] == [1, 2]


def test_features_are_those_of_the_run_and_its_step(tmp_path: Path) -> None:
    """At the beginning those of step 0, so that a run with the same seed has them whatever was drawn before."""
    options = replace(SHORT, steps=1, redraw_every=0, seed=3)
    quiet_train(tmp_path, options)
    model = SubquadForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(name.endswith("features.weight") for name in before)
    model.redraw(feature_seed(3, 0))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_redraw_happens_when_it_should(tmp_path: Path) -> None:
    drawn = {}
    for every in (0, 4):
        quiet_train(tmp_path / str(every), replace(SHORT, redraw_every=every))
        model = SubquadForCausalLM.from_pretrained(tmp_path / str(every) / "model")
        drawn[every] = model.mechanisms()[0].weight
    assert not torch.equal(drawn[0], drawn[4])


def with_large_queries(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Every model begins with attention that is too sharp for features."""

    def build(corpus: Corpus, options: TrainOptions) -> object:
        model = build_model(corpus, options)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(size if name.endswith(("q_proj.weight", "k_proj.weight")) else 1)
        return model

    monkeypatch.setattr(run, "build_model", build)


def test_features_of_no_use_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(SHORT, steps=4, eval_every=1, hidden=32, attention_options={"num_features": 8, "near": 4})
    with_large_queries(monkeypatch, 300)
    with pytest.warns(errors.FeatureWarning) as seen:
        quiet_train(tmp_path / "sharp", options)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert text.startswith("train: at step 1 the features of 2 layers do about as badly as the mean of all values, by ")
    assert "sequences: model.layers.0.attention.mechanism (" in text
    assert ", model.layers.1.attention.mechanism (" in text
    assert text.endswith(
        "`subquad diagnose` tells more, head by head; `subquad.calibrate` fits features to the model; or give these "
        "layers exact attention (softmax)"
    )


@pytest.mark.parametrize(
    "options",
    [
        replace(SHORT, attention_options={"num_features": 8, "near": 64}),  # nothing is far away
        replace(SHORT, attention="softmax", attention_options={}, redraw_every=0),
    ],
    ids=["no far field", "no features"],
)
def test_layers_without_features_to_blame(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_large_queries(monkeypatch, 300)
    quiet_train(tmp_path, replace(options, steps=1, eval_every=1))  # a warning would be an error


@pytest.mark.parametrize("patience", [4, 5])
def test_far_fields_of_no_use_are_told_at_the_end(
    patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchFeatures, "PATIENCE", patience)
    monkeypatch.setattr("subquad.diagnostics.far_field.SMALL_SHARE", 2.0)
    options = replace(SHORT, steps=4, eval_every=1, attention_options={"num_features": 8, "near": 4})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_train(tmp_path, options)
    texts = [str(warning.message) for warning in seen if warning.category is errors.FeatureWarning]
    assert len(texts) == (patience == 4)
    for text in texts:
        assert text.startswith(
            "train: the far field of 2 layers contributes nothing on held-out sequences: "
            "model.layers.0.attention.mechanism (without it the output changes by "
        )
        assert text.endswith(
            "or the model has not learned to look there yet: more steps, longer windows, more features"
        )


def test_watching_features_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(SHORT, steps=3, eval_every=1)
    quiet_train(tmp_path / "watched", options)
    monkeypatch.setattr(WatchFeatures, "on_evaluate", lambda *_, **__: None)
    quiet_train(tmp_path / "unwatched", options)
    assert weights(tmp_path / "watched") == weights(tmp_path / "unwatched")


def test_fine_tuning_begins_with_given_weights(tmp_path: Path) -> None:
    quiet_train(tmp_path / "base", SHORT)
    tuned = replace(SHORT, init=str(tmp_path / "base"), learning_rate=1e-12, warmup=0, redraw_every=0, dropout=0.0)
    quiet_train(tmp_path / "tuned", tuned)
    base, after = (SubquadForCausalLM.from_pretrained(tmp_path / n / "model").state_dict() for n in ("base", "tuned"))
    for name, tensor in base.items():
        assert_close(after[name], tensor, 1e-6, name)
    wrong = replace(tuned, hidden=32)
    message = message_of(lambda: quiet_train(tmp_path / "wrong", wrong), tmp_path)
    assert message.startswith("base/model: does not fit the model to be trained (")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(("before", "after"), [("window", "favor"), ("favor", "softmax"), ("favor", "linear")])
def test_fine_tuning_with_another_mechanism(tmp_path: Path, before: str, after: str) -> None:
    plain = replace(SHORT, redraw_every=0, dropout=0.0)
    quiet_train(tmp_path / "base", replace(plain, attention=before, attention_options={}))
    tuned = replace(
        plain, attention=after, attention_options={}, init=str(tmp_path / "base"), learning_rate=1e-12, warmup=0
    )
    quiet_train(tmp_path / "tuned", tuned)
    base, now = (SubquadForCausalLM.from_pretrained(tmp_path / n / "model").state_dict() for n in ("base", "tuned"))
    for name in base.keys() | now.keys():
        if "mechanism" in name:
            assert (name in now) == (after == "favor")
        else:
            assert_close(now[name], base[name], 1e-6, name)


def test_fine_tuning_with_features_of_another_number(tmp_path: Path) -> None:
    quiet_train(tmp_path / "base", SHORT)
    other = replace(SHORT, init=str(tmp_path / "base"), attention_options={"num_features": 24})
    message = message_of(lambda: quiet_train(tmp_path / "tuned", other), tmp_path)
    assert message.startswith("base/model: does not fit the model to be trained (")


def test_bfloat16(tmp_path: Path) -> None:
    result = quiet_train(tmp_path, replace(SHORT, precision="bfloat16"))
    assert 2 < result.metrics["eval_loss"] < 4


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("reversible", [False, True])
def test_two_processes_end_with_equal_weights(tmp_path: Path, reversible: bool) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(29_700 + reversible)]
    script(*launch, HERE / "two_ranks.py", tmp_path, int(reversible))
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name]), name
    single = replace(SHORT, batch_size=2, dropout=0.0, reversible=reversible)
    quiet_train(tmp_path / "single", single)
    alone = SubquadForCausalLM.from_pretrained(tmp_path / "single" / "model").state_dict()
    for name, tensor in ranks[0].items():
        assert_close(tensor, alone[name], 1e-4, name)
    evaluations = [MetricsFile(tmp_path / name).records()[-1]["eval_loss"] for name in ("run", "single")]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)


# Muon -----------------------------------------------------------------------------------------------------------------


def test_muon_directions_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(20, 30), torch.randn(30, 20), torch.randn(20, 30) * 1e-6, torch.randn(20, 30) * 1e6]
    for matrix, made in zip(matrices, orthogonalised(matrices), strict=True):
        values = torch.linalg.svdvals(made) / (0.2 * 30**0.5)
        assert 0.6 < values.min() <= values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert (made * (u @ v)).sum() / made.norm() / (u @ v).norm() > 0.97
    assert torch.equal(orthogonalised([torch.zeros(3, 4)])[0], torch.zeros(3, 4))


def test_muon_takes_the_matrices_inside() -> None:
    config = SubquadConfig(hidden_size=16, num_hidden_layers=1, tie_word_embeddings=False)
    model = SubquadForCausalLM(config)
    matrices, others = split_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("layers" in names[id(matrix)] for matrix in matrices)
    assert len(matrices) == 7
    assert {names[id(p)] for p in others} >= {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


def test_muon_learns_and_saves() -> None:
    torch.manual_seed(0)
    model, target = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)), torch.randn(3, 6)
    optimizer = MuonAdamW(model, 0.05)
    x = torch.randn(64, 6)

    def step() -> float:
        loss = (model(x) - x @ target.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    first = step()
    assert [step() for _ in range(200)][-1] < first / 20
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    wanted = [step(), step()]
    again = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    again.load_state_dict(saved["model"])
    model, optimizer = again, MuonAdamW(again, 0.05)
    optimizer.load_state_dict(saved["optimizer"])
    assert step() == wanted[0]


# Errors ---------------------------------------------------------------------------------------------------------------


def message_of(call, folder: Path) -> str:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    return str(caught.value).replace(f"{folder}/", "").replace(str(folder), "FOLDER")


def told_by(call, folder: Path) -> list[str]:
    with pytest.warns(errors.DamageWarning) as seen:
        call()
    return [str(warning.message).replace(f"{folder}/", "").replace(str(folder), "FOLDER") for warning in seen]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert message_of(lambda: quiet_train(tmp_path, SHORT), tmp_path) == (
        "FOLDER: is not empty; continue the run in it with --resume, or choose another folder"
    )
    assert message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path) == (
        "FOLDER: is not a run (no run.json, but mine.txt); choose another folder"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt"}


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with files_module.locked(tmp_path):
        assert message_of(lambda: quiet_train(tmp_path, SHORT), tmp_path) == (
            "FOLDER: another process is training in this folder; wait for it, or choose another"
        )
    assert quiet_train(tmp_path, replace(SHORT, steps=1)).step == 1


def test_other_options_are_refused(tmp_path: Path) -> None:
    quiet_train(tmp_path, replace(SHORT, steps=1))
    assert message_of(lambda: quiet_train(tmp_path, replace(SHORT, steps=1, hidden=32), resume=True), tmp_path) == (
        "FOLDER: was begun with other settings (hidden: 16 -> 32); resume with those of the run, or begin another"
    )


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    quiet_train(tmp_path, replace(SHORT, steps=1))
    record = RunRecord.load(tmp_path)
    assert record is not None
    replace(record, processes=2).save(tmp_path)
    assert message_of(lambda: quiet_train(tmp_path, replace(SHORT, steps=1), resume=True), tmp_path) == (
        "FOLDER: was begun with other settings (processes: 2 -> 1); resume with those of the run, or begin another"
    )


def test_runs_begun_before_there_were_short_convolutions_have_none(tmp_path: Path) -> None:
    without = replace(SHORT, steps=1, short_conv=0)
    quiet_train(tmp_path, without)
    stored = read_record(tmp_path / "run.json")
    del stored["options"]["short_conv"]
    write_record(tmp_path / "run.json", stored)
    record = RunRecord.load(tmp_path)
    assert record is not None
    assert record.options == without


def test_damaged_checkpoints_are_seen(tmp_path: Path) -> None:
    quiet_train(tmp_path, SHORT)
    path = tmp_path / "checkpoints" / "checkpoint-6" / "optimizer.pt"
    whole = path.read_bytes()
    weights_before = weights(tmp_path)
    remove(tmp_path / "model")  # as if the run had been stopped there
    for damaged in (whole[:-1], whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:], b""):
        path.write_bytes(damaged)
        assert damage(path.parent) == "optimizer.pt is not what was written"
    path.unlink()
    assert damage(path.parent) == "optimizer.pt is missing"
    told = told_by(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path)
    assert told == ["checkpoints: checkpoint-6 is damaged (optimizer.pt is missing); taking checkpoint-4"]
    assert weights(tmp_path) == weights_before
    assert newest(tmp_path / "checkpoints") == path.parent  # it was made again
    assert [record["step"] for record in MetricsFile(tmp_path).records()] == [1, 2, 3, 4, 5, 6, 6]


def test_without_a_whole_checkpoint_a_run_is_refused(tmp_path: Path) -> None:
    quiet_train(tmp_path, SHORT)
    remove(tmp_path / "model")
    (tmp_path / "checkpoints" / "checkpoint-6" / "files.json").unlink()
    (tmp_path / "checkpoints" / "checkpoint-4" / "extra.pt").write_text("")
    message = (
        "checkpoints: no checkpoint is whole, checkpoint-6 is damaged (files.json is missing), checkpoint-4 is damaged "
        "(extra.pt is not among the files of files.json); remove the folder of the run to begin again"
    )
    assert message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path) == message
    assert message_of(lambda: model_folder(tmp_path), tmp_path) == message
    assert len(MetricsFile(tmp_path).records()) == 7  # nothing is forgotten


def test_commands_take_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    quiet_train(tmp_path, SHORT)
    remove(tmp_path / "model")
    (tmp_path / "checkpoints" / "checkpoint-6" / "config.json").write_text("{}")
    with pytest.warns(errors.DamageWarning, match="checkpoint-6 is damaged .config.json is not what was written.; ta"):
        assert model_folder(tmp_path).name == "checkpoint-4"


@pytest.mark.parametrize("what", ["model", "summary"])
def test_what_a_finished_run_has_lost_is_made_again(what: str, tmp_path: Path) -> None:
    first, before = quiet_train(tmp_path, SHORT), weights(tmp_path)
    path = tmp_path / "model" / "model.safetensors" if what == "model" else tmp_path / "summary.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    (told,) = told_by(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path)
    assert told.startswith(
        "model: model.safetensors is not what was written; " if what == "model" else "summary.json: is not what was "
    )
    assert told.endswith("; it is made again from the last checkpoint")
    assert weights(tmp_path) == before
    assert quiet_train(tmp_path, SHORT, resume=True).metrics == first.metrics


def test_a_finished_run_needs_no_checkpoint(tmp_path: Path) -> None:
    first = quiet_train(tmp_path, SHORT)
    for checkpoint in checkpoints(tmp_path / "checkpoints"):
        (checkpoint / "optimizer.pt").unlink()
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    assert quiet_train(tmp_path, SHORT, resume=True) == first
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


MANIFESTS = {
    "empty": b"",
    "no files": b"{}",
    "list": b'["config.json"]',
    "text": b'"config.json"',
    "numbers": b'{"config.json": 3}',
    "not UTF-8": b'{"config.json": "\xff"}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", MANIFESTS.values(), ids=MANIFESTS)
def test_a_malformed_manifest_does_not_verify(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "files.json").write_bytes(content)
    assert message_of(lambda: verify(tmp_path), tmp_path) == (
        "FOLDER: files.json is no list of files with their checksums; use a copy that is whole, or --resume the run "
        "that made it"
    )


def test_notes_do_not_count_as_files(tmp_path: Path) -> None:
    quiet_train(tmp_path, replace(SHORT, steps=1))
    model = tmp_path / "model"
    for name in ("README.md", ".DS_Store"):
        (model / name).write_text("mine")
    verify(model)
    (model / "added_tokens.json").write_text("{}")
    assert damage(model) == "added_tokens.json is not among the files of files.json"


def test_pickles_that_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the checksums were made to fit."""
    quiet_train(tmp_path, SHORT)
    remove(tmp_path / "model")
    checkpoint = tmp_path / "checkpoints" / "checkpoint-6"
    torch.save(Path("/"), checkpoint / "optimizer.pt")
    (checkpoint / "files.json").write_text(json.dumps(files_module._digests(checkpoint)))
    assert message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path) == (
        "checkpoints/checkpoint-6: holds a pickle that would run code, which is never loaded; use weights as "
        "safetensors, or a checkpoint that subquad has written"
    )
    torch.save({"param_groups": 3}, checkpoint / "optimizer.pt")
    (checkpoint / "files.json").write_text(json.dumps(files_module._digests(checkpoint)))
    message = message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path)
    assert message.startswith("checkpoints/checkpoint-6: cannot be loaded (")
    assert message.endswith("); it is of another version or model")


# What is only a record ------------------------------------------------------------------------------------------------

DAMAGED_LINES = {
    "bytes": b'{"step": 2, "loss": "\xff\xfe"}',
    "no JSON": b'{"step": 2, "lo',
    "no object": b"[2]",
    "no step": b'{"loss": 2.0}',
    "step is text": b'{"step": "2"}',
    "step is true": b'{"step": true}',
    "value is text": b'{"step": 2, "loss": "=2"}',
    "unknown": b'{"step": 2, "lass": 2.0}',
    "huge": b'{"step": 2, "loss": ' + b"9" * 400 + b"}",
    "endless": b'{"step": 2, "loss": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "empty": b"",
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_damaged_lines_are_left_out_and_told(line: bytes, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3, "loss": NaN, "eval_loss": Infinity}\n')
    told = told_by(lambda: [file.records(), file.records()], tmp_path)
    assert told == ["metrics.jsonl: 1 damaged lines are left out (2)"]
    with pytest.warns(errors.DamageWarning):
        records = MetricsFile(tmp_path).records()
    assert [record["step"] for record in records] == [1, 3]
    file.write_csv()
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 3
    plot_losses({"run": records}, tmp_path / "loss.png", unigram=3.0, unit="residue")


def test_many_damaged_lines_are_one_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.path.write_bytes(b"?\n" * 12)
    (told,) = told_by(file.records, tmp_path)
    assert told == "metrics.jsonl: 12 damaged lines are left out (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)"


def test_a_damaged_record_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that goes on nor one that is resumed."""
    whole = quiet_train(tmp_path / "whole", SHORT)
    append = MetricsFile.append

    def append_and_damage(self: MetricsFile, record: dict) -> None:
        append(self, record)
        with self.path.open("ab") as file:
            file.write(b"\xff\n" if record["step"] == 2 else b"")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", append_and_damage)
        told = told_by(lambda: quiet_train(tmp_path / "run", SHORT), tmp_path)
    assert told == ["run/metrics.jsonl: 1 damaged lines are left out (3)"]
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    remove(tmp_path / "run" / "model")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"eval_loss", b"eval_lo\xff"))
    (told,) = told_by(lambda: quiet_train(tmp_path / "run", SHORT, resume=True), tmp_path)
    assert told == "run/metrics.jsonl: 2 damaged lines are left out (3, 8)"
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["metrics"] == whole.metrics


def test_results_are_not_read_from_a_record(tmp_path: Path) -> None:
    whole = quiet_train(tmp_path, SHORT)
    remove(tmp_path / "model")
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(re.sub(rb'"eval_loss": [0-9.]+', b'"eval_loss": 1.5', path.read_bytes()))
    assert quiet_train(tmp_path, SHORT, resume=True).metrics == whole.metrics


def test_a_damaged_record_is_seen(tmp_path: Path) -> None:
    quiet_train(tmp_path, replace(SHORT, steps=1))
    whole = (tmp_path / "run.json").read_bytes()
    for content in (
        b"{",
        whole.replace(b"favor", b"fav\xffr"),
        b"[" * 100_000,
        whole.replace(b'"options"', b'"option"'),
    ):
        (tmp_path / "run.json").write_bytes(content)
        message = message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path)
        assert message.startswith(
            ("run.json: cannot be read", "run.json: is not what was written, its checksum differs; ")
        )
        assert "\n" not in message
    (tmp_path / "run.json").write_text("[]")
    assert message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path) == (
        "run.json: must hold a JSON object, got list; it is damaged"
    )
    (tmp_path / "run.json").write_bytes(whole.replace(b'"hidden": 16', b'"hidden": 18'))
    assert message_of(lambda: quiet_train(tmp_path, SHORT, resume=True), tmp_path) == (
        "run.json: is not what was written, its checksum differs; use a copy that is whole, or begin another run with "
        "the weights of this one (--init)"
    )


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    options = replace(SHORT, learning_rate=1e30, warmup=0, save_every=1)
    message = message_of(lambda: quiet_train(tmp_path, options), tmp_path)
    assert message.startswith("train: the loss is nan at step 3; checkpoint-2 is kept; try a smaller learning rate")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert message_of(lambda: quiet_train(tmp_path / "file" / "run", SHORT), tmp_path) == (
        "file/run: cannot be written (Not a directory); nothing was lost"
    )


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may not exceed some kilobytes from the second checkpoint on, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fetch = Samples.__getitem__

    def fetch_and_fill(self: Samples, index: int):
        if index == 3 and len(self) > 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return fetch(self, index)

    monkeypatch.setattr(Samples, "__getitem__", fetch_and_fill)
    try:
        message = message_of(lambda: quiet_train(tmp_path, SHORT), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.startswith("checkpoints/checkpoint-4: cannot be written (")
    assert message.endswith("nothing was lost")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]
    monkeypatch.setattr(Samples, "__getitem__", fetch)
    assert quiet_train(tmp_path, SHORT, resume=True).step == 6


ERRORS = {
    "steps": ({"steps": 0}, "train: steps must be a whole number of at least 1, got 0"),
    "infinite rate": ({"learning_rate": math.inf}, "train: learning_rate must be a positive number, got inf"),
    "decay": ({"weight_decay": -1.0}, "train: weight_decay must be a number of at least 0, got -1.0"),
    "seed": ({"seed": 2**32}, "train: seed must be below 2**32, got 4294967296"),
    "threads": ({"threads": 100_000}, "train: threads must be at most 1024, got 100000"),
    "float16": ({"precision": "float16"}, "train: precision='float16' needs a GPU; use bfloat16 or float32"),
    "rate": ({"learning_rate": -1.0}, "train: learning_rate must be a positive number, got -1.0"),
    "layout": ({"layout": "crop"}, "train: layout must be one of windows, crops, got 'crop' (did you mean 'crops'?)"),
    "redraw": (
        {"attention": "softmax", "attention_options": {}},
        "train: redraw_every=5, but no layer has random features; leave it out",
    ),
    "window": (
        {"window": 3_000_000},
        "samples: a window of 3,000,000 tokens is longer than the data, 1,734,854 with separators; "
        "use a shorter window or more data",
    ),
    "held-out window": (
        {"window": 1_000_000},
        "samples: a window of 1,000,000 tokens is longer than the held-out data, 84,415 with separators; "
        "use a shorter window, or hold out a larger share than 0.05",
    ),
    "attention": (
        {"attention": "performer", "attention_options": {}},
        f"unknown attention 'performer' (did you mean 'linformer'?); known: {', '.join(m.name for m in MECHANISMS)}",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), ERRORS.values(), ids=ERRORS)
def test_wrong_options_leave_nothing_behind(wrong: dict, message: str, tmp_path: Path) -> None:
    assert message_of(lambda: quiet_train(tmp_path / "run", replace(SHORT, **wrong)), tmp_path) == message
    assert not (tmp_path / "run").exists()


def test_no_model(tmp_path: Path) -> None:
    assert message_of(lambda: model_folder(tmp_path / "no"), tmp_path) == (
        "no: does not exist; give a run folder or a model folder"
    )
    assert message_of(lambda: model_folder(tmp_path), tmp_path) == (
        "FOLDER: holds no model (no config.json), nor is it a run with a checkpoint; "
        "give a run folder or a model folder"
    )
