"""Times and memory, by a clock and a /proc that the tests make up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stopped_clock import Clock
from subquad import measure
from subquad.bench import decode_costs, decoding, peak_memory, time_side_by_side
from tiny_models import make, random_ids


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (measure, decoding):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_calls_take_turns_and_the_first_of_each_does_not_count(clock: Clock) -> None:
    order: list[str] = []

    def call(name: str, seconds: list[float]) -> None:
        order.append(name)
        clock.now += seconds.pop(0)

    times = {"a": [100.0, 1.0, 5.0, 3.0], "b": [200.0, 0.5, 0.25, 0.125]}
    found = time_side_by_side({name: lambda name=name: call(name, times[name]) for name in "ab"})
    assert order == list("abababab")
    assert found["a"].samples == (1.0, 5.0, 3.0)
    assert (found["a"].best, found["a"].median) == (1.0, 3.0)
    assert found["b"].samples == (0.5, 0.25, 0.125)


def test_the_cost_of_one_more_token(clock: Clock) -> None:
    model, ids = make(attention="softmax", dtype=torch.float32, short_conv=0), random_ids(12)
    asked: list[tuple[list[int], int]] = []

    def told(input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert use_cache
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        asked.append((input_ids[0].tolist(), before))
        clock.now += 0.5 + before
        return model(input_ids, past_key_values=past_key_values, use_cache=True)

    short, long = decode_costs(told, ids, (4, 10), new_tokens=2, repeats=3)
    assert asked[:2] == [(ids[:4].tolist(), 0), (ids[:10].tolist(), 0)]
    one_round = [([int(ids[i])], size + i) for size in (4, 10) for i in (0, 1)]
    assert asked[2:] == 4 * one_round  # a round to warm up, three to measure; the cache is new in each
    assert short.timing.samples == (5.0,) * 3  # (0.5 + 4 + 0.5 + 5) / 2
    assert long.timing.samples == (11.0,) * 3
    assert (short.context, long.context) == (4, 10)
    assert short.tokens_per_second == 0.2
    assert short.cache_bytes / 4 == long.cache_bytes / 10 > 0


def test_peak_memory_is_what_came_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:  900 kB\nVmRSS:  300 kB\n")
    monkeypatch.setattr(measure, "STATUS", status)
    monkeypatch.setattr(measure, "CLEAR", tmp_path / "clear_refs")
    assert peak_memory(lambda: status.write_text("VmHWM:  1300 kB\nVmRSS:  350 kB\n")) == 1000 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert peak_memory(lambda: status.write_text("VmHWM:  100 kB\nVmRSS:  50 kB\n")) == 0


def test_peak_memory_where_nobody_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CLEAR", tmp_path / "no" / "clear_refs")
    done: list[int] = []
    assert peak_memory(lambda: done.append(1)) is None
    assert done == [1]
