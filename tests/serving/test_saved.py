"""Caches on disk: the same in another process, and nothing else ever taken for one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import subquad
from subquad import errors
from subquad.calibration import calibrate
from subquad.conversion import swap_attention
from subquad.models import SubquadForCausalLM
from subquad.serving import Batcher, join, load_cache, read, save_cache
from tiny_served import MODELS, alone, lengths, ours, prompt, swapped

HERE = Path(__file__).parent.parent
PROGRAM = """
import sys
from tiny_served import MODELS, prompt
from subquad.serving import Batcher, load_cache
model = MODELS[sys.argv[1]]()
batcher = Batcher(model)
request = batcher.submit(prompt(5, 1), 9, prefix=load_cache(model, sys.argv[2]))
batcher.run()
print(*request.tokens)
"""


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_cache_is_as_good_as_the_prompt(name: str, tmp_path: Path) -> None:
    model, system = MODELS[name](), prompt(11, 50)
    save_cache(model, read(model, system), tmp_path / "system.safetensors")
    cache = load_cache(model, tmp_path / "system.safetensors")
    assert (cache.get_seq_length(), lengths(cache)) == (11, [11])
    whole = torch.cat([system, prompt(4)])
    assert alone(model, whole, 6, past_key_values=cache.snapshot()) == alone(model, whole, 6)
    batcher = Batcher(model)
    request = batcher.submit(prompt(4), 6, prefix=cache)
    batcher.run()
    assert request.tokens == alone(model, whole, 6)


@pytest.mark.parametrize("name", ["short_conv", "llama mixed"])
def test_in_another_process(name: str, tmp_path: Path) -> None:
    model, path = MODELS[name](), tmp_path / "system.safetensors"
    save_cache(model, read(model, prompt(11, 50)), path)
    paths = os.pathsep.join([str(Path(subquad.__file__).parent.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    want = alone(model, torch.cat([prompt(11, 50), prompt(5, 1)]), 9)
    assert [int(word) for word in done.stdout.split()] == want


@pytest.mark.parametrize("name", ["favor", "llama favor"])
def test_with_a_model_that_was_saved_too(name: str, tmp_path: Path) -> None:
    """Where a model lies, and which program saved it, is not what it is."""
    model = MODELS[name]()
    save_cache(model, read(model, prompt(7)), tmp_path / "cache.safetensors")
    model.save_pretrained(tmp_path / "model")
    if name == "favor":
        again = SubquadForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=False, dtype=torch.float64)
    else:
        again = subquad.load(tmp_path / "model", dtype=torch.float64).double()  # its rotation, too, as in the first
    whole = torch.cat([prompt(7), prompt(3)])
    cache = load_cache(again.eval(), tmp_path / "cache.safetensors")
    assert alone(again, whole, 5, past_key_values=cache) == alone(model, whole, 5)


def test_several_sequences_with_padding(tmp_path: Path) -> None:
    model = ours("favor")
    cache = join(model, [read(model, prompt(3)), read(model, prompt(8))])
    save_cache(model, cache, tmp_path / "cache.safetensors")
    again = load_cache(model, tmp_path / "cache.safetensors")
    assert (lengths(again), again.get_seq_length()) == ([3, 8], 8)


# Another model --------------------------------------------------------------------------------------------------------


def other_weight(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-12


def redrawn(model: Any) -> None:
    model.redraw(7)


def calibrated(model: Any) -> None:
    calibrate(model, [prompt(60)[None]], estimator="sharp", progress=False)


def without_far(model: Any) -> None:
    model.mechanisms()[1].far = False


def other_positions(model: Any) -> None:
    model.config.rope_theta *= 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight": other_weight,
    "features": redrawn,
    "estimator": calibrated,
    "far": without_far,
    "positions": other_positions,
    "dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_of_another_model(change: str, tmp_path: Path) -> None:
    model = ours("favor")
    path = tmp_path / "cache.safetensors"
    save_cache(model, read(model, prompt(7)), path)
    load_cache(model, path)
    CHANGES[change](model)
    assert refusal(lambda: load_cache(model, path)) == (
        f"{path}: is the cache of another model: weights, dtype, mechanisms or their features differ; load the model "
        "that it was saved with, or read the prompt again"
    )


def test_the_same_weights_with_another_mechanism(tmp_path: Path) -> None:
    model, path = swapped("llama", "window"), tmp_path / "cache.safetensors"
    save_cache(model, read(model, prompt(7)), path)
    for other in (swapped("llama", "softmax"), swap_attention(model, "window", window=6)):
        assert "is the cache of another model" in refusal(lambda other=other: load_cache(other, path))


# Other files ----------------------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    model = ours("favor", short_conv=3)
    save_cache(model, read(model, prompt(7)), tmp_path / "cache.safetensors")
    return model, tmp_path / "cache.safetensors"


def test_every_flipped_byte_is_seen(saved: tuple[Any, Path]) -> None:
    model, path = saved
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        assert refusal(lambda: load_cache(model, path)).startswith(f"{path}: ")


def test_every_cut_is_seen(saved: tuple[Any, Path]) -> None:
    model, path = saved
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(lambda: load_cache(model, path)).startswith(f"{path}: is damaged (")
    path.write_bytes(whole + b"0")
    assert refusal(lambda: load_cache(model, path)).startswith(f"{path}: is damaged (")


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """With other tensors, or another header, but a file of safetensors."""
    with safe_open(path, "pt") as file:
        said = json.loads((file.metadata() or {})["subquad_cache"])
    tensors = load_file(path)
    change(said, tensors)
    save_file(tensors, path, {"subquad_cache": json.dumps(said)})


def test_other_numbers_and_other_formats(saved: tuple[Any, Path]) -> None:
    model, path = saved
    whole = path.read_bytes()
    changed = f"{path}: is damaged (its numbers are not those that were written); save_cache makes it again"
    rewritten(path, lambda _, tensors: tensors["length"].add_(1))
    assert refusal(lambda: load_cache(model, path)) == changed
    path.write_bytes(whole)
    rewritten(path, lambda _, tensors: tensors.__delitem__("1.recent"))
    assert refusal(lambda: load_cache(model, path)) == changed
    path.write_bytes(whole)
    rewritten(path, lambda said, _: said.update(format=2))
    assert refusal(lambda: load_cache(model, path)) == (
        f"{path}: is of format 2, this version reads format 1; save it again"
    )
    path.write_bytes(whole)
    rewritten(path, lambda said, _: said.pop("digest"))
    assert refusal(lambda: load_cache(model, path)) == f"{path}: is damaged ('digest'); save_cache makes it again"
    save_file({"length": torch.ones(1)}, path)
    assert refusal(lambda: load_cache(model, path)) == f"{path}: is not a cache that save_cache wrote"
    assert refusal(lambda: load_cache(model, path / "none")) == f"{path / 'none'}: there is no such file"


def test_a_failed_write_leaves_what_was_there(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = saved
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert refusal(lambda: save_cache(model, read(model, prompt(3)), path)) == (
        f"save_cache: {path} cannot be written (No space left on device)"
    )
    assert path.read_bytes() == before
    assert [other.name for other in path.parent.iterdir()] == [path.name]
