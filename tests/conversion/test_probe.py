"""Texts that are read twice."""

from typing import Any

import pytest
import torch

from subquad.conversion.probe import copied

IDS = torch.arange(1, 13).view(2, 6)


def test_the_first_half_comes_again() -> None:
    assert copied(IDS, 100).tolist() == [[1, 2, 3, 1, 2, 3], [7, 8, 9, 7, 8, 9]]  # pyright: ignore[reportOptionalMemberAccess]
    assert copied(IDS, 5).tolist() == [[1, 2, 1, 2], [7, 8, 7, 8]]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]], [[0, 0, 1, 1, 1, 1], [1] * 6]], ids=str)
def test_padding_is_left_out(mask: list[list[int]]) -> None:
    given = {"input_ids": IDS, "attention_mask": torch.tensor(mask)}
    want = []
    for ids, real in zip(IDS.tolist(), mask, strict=True):
        kept = [token for token, there in zip(ids, real, strict=True) if there][:2]
        want.append(kept + kept)
    assert copied(given, 100).tolist() == want  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(2, 6),
        torch.zeros(2, 3, 8, 8),
        {"pixel_values": torch.rand(1, 3, 8, 8)},
        {"input_ids": IDS, "attention_mask": torch.zeros(2, 6)},
        IDS[:, :1],
        (torch.rand(2, 6, 4),),
    ],
    ids=["numbers", "pictures", "named pictures", "padding alone", "one token", "embeddings"],
)
def test_what_holds_no_text_has_no_copy(batch: Any) -> None:
    assert copied(batch, 100) is None
    assert copied((IDS, "more"), 100) is not None
