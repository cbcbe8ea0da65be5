"""Lets commands die at every file operation of what they write, and in the middle of a write; what was there before
must be whole, or what was to come, and the next start must sweep what is left over.

python tests/crash_outputs.py FOLDER COMMAND ...
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from processes import finish, fork
from subquad.cli import main as subquad
from subquad.data import protein_tokenizer
from subquad.files import STAGING, remove, sweep
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.training import save_model

CRASHED = 17
SEQUENCES = "".join(f">p{i}\n{'MKVLAAGIVGLTREW' * 4}\n" for i in range(6))
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")
COMMANDS: dict[str, tuple[list[str], str]] = {  # arguments, and the option that takes the output
    "score": ([], "--output scores.csv"),
    "embed": ([], "--output vectors.npz"),
    "generate": (["--length", "20"], "--output new.fasta"),
    "diagnose": (["--length", "32", "--rows", "4"], "--output heads.png --json heads.json"),
    "spectrum": (["--length", "16", "--num", "1"], "--output spectrum.png"),
    "calibrate": (["--length", "32", "--num", "2"], "--out calibrated"),
}


def prepare(folder: Path) -> None:
    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention="favor",
        attention_options={"num_features": 4, "near": 4},
        domain="protein",
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    save_model(SubquadForCausalLM(config), protein_tokenizer(), folder / "model")
    (folder / "some.fasta").write_text(SEQUENCES)


def clear(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()


def run(command: str, folder: Path, *, quiet: bool = True) -> int:
    arguments, option = COMMANDS[command]
    sources = [folder / "model", *([] if command == "generate" else [folder / "some.fasta"])]
    outputs = [word if word.startswith("--") else str(folder / "out" / word) for word in option.split()]
    words = [command, *map(str, sources), *arguments, *outputs]
    if not quiet:
        return subquad(words)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return subquad(words)


def outputs(folder: Path) -> dict[str, bytes]:
    """What is visible of the output folder."""
    inside = (path for path in sorted((folder / "out").rglob("*")) if path.is_file())
    found = {str(path.relative_to(folder / "out")): path.read_bytes() for path in inside}
    return {name: content for name, content in found.items() if not name.startswith(STAGING)}


def crash_at(number: int, folder: Path) -> None:
    """The process ends, without any clean-up, just before the numbered operation on what it writes."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os._exit(CRASHED)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(folder / "out")):
            step()

    sync = os.fsync

    def counted(handle: int) -> None:
        step()
        sync(handle)

    sys.addaudithook(heard)
    os.fsync = counted


def die_after(size: int) -> None:
    """The system kills the process in the middle of the write that makes a file larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def old_or_new(before: dict[str, bytes], after: dict[str, bytes], folder: Path) -> None:
    found = outputs(folder)
    for name, content in found.items():
        assert content in (before.get(name), after.get(name)), f"{name} is neither old nor new"
    assert set(found) >= set(before), f"{set(before) - set(found)} is gone"


def interrupted(command: str, folder: Path, prepare_death: Callable[[], None]) -> int:
    def dying() -> None:
        prepare_death()
        assert run(command, folder) == 0

    return finish(fork(dying))


def torture(command: str, folder: Path) -> int:
    """Kills the command at every operation and at some sizes; how often."""
    clear(folder)
    assert finish(fork(lambda: _succeed(command, folder))) == 0
    after = outputs(folder)
    kills = sum(kill(command, folder, after, lambda size=size: die_after(size)) for size in (0, 1, 100))
    number = 1
    while kill(command, folder, after, lambda number=number: crash_at(number, folder)):
        kills, number = kills + 1, number + 1
    return kills


def kill(command: str, folder: Path, after: dict[str, bytes], death: Callable[[], None]) -> bool:
    """Runs the command into its death, then once more; whether it died."""
    before = reset(command, folder)
    code = interrupted(command, folder, death)
    assert code in (0, CRASHED, -signal.SIGXFSZ), f"{command}: exit code {code}"
    old_or_new(before, after, folder)
    if before or not outputs(folder):
        assert finish(fork(lambda: _succeed(command, folder))) == 0, f"{command} fails after a kill"
    else:  # the new folder is whole, and is not made again
        sweep(folder / "out")
    assert outputs(folder) == after, f"{command} makes something else after a kill"
    left = [path.name for path in (folder / "out").glob(f"{STAGING}*")]
    assert not left, f"{command}: {left} is left over"
    return code != 0


def _succeed(command: str, folder: Path) -> None:
    assert run(command, folder) == 0


def reset(command: str, folder: Path) -> dict[str, bytes]:
    """Old files in the place of the new ones; a folder must be new, so there is none."""
    if command == "calibrate":
        remove(folder / "out" / "calibrated")
        return {}
    for path in (folder / "out").iterdir():
        path.write_bytes(b"old and dear " * 100)
    return outputs(folder)


def main(folder: Path, commands: list[str]) -> None:
    prepare(folder)
    for command in commands:
        print(f"{command}: {torture(command, folder)} kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
