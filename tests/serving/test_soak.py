"""Requests that come and go leave nothing behind: for a few rounds, and for ten minutes (`SOAK_SECONDS`)."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.measure import STATUS
from subquad.serving import Batcher, load_cache, read, save_cache
from tiny_served import MODELS, prompt

LENGTHS = (3, 17, 1, 9, 6, 30, 2)
NEW = (5, 12, 20, 1, 9, 15, 16)
SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
ROOM = 16 * 2**20  # what an allocator may keep; ten minutes are thousands of requests, whose states take ten times that


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def resident() -> int:
    """Bytes of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def work(batcher: Batcher, rounds: int, path: Path) -> None:
    """Greedy and sampled requests, some behind a prefix that went through a file, one of seven cancelled."""
    model = batcher._reader.model
    for turn in range(rounds):
        save_cache(model, read(model, prompt(8, turn)), path)
        prefix = load_cache(model, path)
        for seed, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
            sampling: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9} if seed % 2 else {}
            start = prefix if seed % 3 == 0 else None
            request = batcher.submit(prompt(length, turn + seed), new, prefix=start, **sampling)
            for _ in range(3):
                batcher.step()
            if seed == turn % 7:
                request.cancel()
        batcher.run()
        assert batcher.nbytes() == 0


@pytest.mark.parametrize("name", ["favor", "short_conv", "pages", "llama mixed", "gpt2 window"])
def test_nothing_is_left_behind(name: str, tmp_path: Path) -> None:
    batcher = Batcher(MODELS[name](), rows=3, prefill=4)
    work(batcher, 1, tmp_path / "cache.safetensors")
    before = live_tensors()
    work(batcher, 5, tmp_path / "cache.safetensors")
    assert live_tensors() == before


@pytest.mark.full
@pytest.mark.skipif(not STATUS.exists(), reason="memory is measured by Linux's /proc")
def test_ten_minutes_at_constant_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batchers = [Batcher(MODELS[name](), rows=3, prefill=4) for name in ("short_conv", "llama mixed", "gpt2 pages")]
    end, path = time.monotonic() + SECONDS, tmp_path / "cache.safetensors"
    warm = time.monotonic() + SECONDS / 10
    while time.monotonic() < warm:
        for batcher in batchers:
            work(batcher, 1, path)
    tensors, memory = live_tensors(), resident()
    while time.monotonic() < end:
        for batcher in batchers:
            work(batcher, 1, path)
        assert live_tensors() == tensors
        assert resident() < memory + ROOM
