"""What commands share, without a model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.cli import common
from subquad.cli.common import Loaded, Named, cut_sequences
from subquad.errors import DataError
from subquad.models import SubquadConfig

START = 1


def loaded(domain: str) -> Loaded:
    return Loaded(type("Model", (), {"config": SubquadConfig(bos_token_id=START)}), None, domain)


def cut(domain: str, lengths: list[int], length: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = [Named(f"number {n}", torch.arange(10, 10 + n)) for n in lengths]
    monkeypatch.setattr(common, "read_sequences", lambda *_: found)
    return [piece.tolist() for piece in cut_sequences(loaded(domain), [Path("a.fasta"), Path("b")], length)]


def test_sequences_are_cut_and_begin_with_the_start_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut("protein", [2, 3, 5], 4, monkeypatch) == [[1, 10, 11], [1, 10, 11, 12], [1, 10, 11, 12]]


def test_a_text_is_many_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut("text", [5, 2], 3, monkeypatch) == [[1, 10, 11], [1, 12, 13], [1, 14], [1, 10, 11]]
    assert cut("text", [2], 1, monkeypatch) == [[1], [1]]


def test_files_without_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as caught:
        cut("protein", [], 4, monkeypatch)
    assert str(caught.value) == "a.fasta, b: holds no sequence"
