"""How work is cut up for the C++ engine: no result depends on it, so only numbers can show a mistake."""

import pytest
import torch

from subquad.kernels.cpu.call import block_size, blocks_per_segment, border_count, parts_per_head


@pytest.mark.parametrize("threads", range(1, 9))
def test_every_thread_has_as_much_to_do(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for heads in range(1, 4 * threads):
        even = (parts for parts in range(1, threads + 1) if heads * parts % threads == 0)
        assert parts_per_head(heads) == next(even)
    assert parts_per_head(4 * threads) == parts_per_head(4 * threads + 1) == 1  # many heads even out by themselves


def test_blocks_are_no_longer_than_the_sequence() -> None:
    assert [block_size(100, 0, length) for length in (0, 1, 99, 100, 101)] == [1, 1, 99, 100, 100]
    assert [block_size(0, chunk, 1) for chunk in (0, 1, 64, 65)] == [64, 1, 64, 64]


def test_states_are_kept_four_times_their_features_apart() -> None:
    assert [blocks_per_segment(64, features) for features in (1, 16, 32, 256, 1024, 1040)] == [1, 1, 2, 16, 64, 64]


def test_every_segment_that_begins_has_a_border() -> None:
    assert [border_count(length, 64, 32) for length in (1, 128, 129, 256, 257)] == [1, 1, 2, 2, 3]
