"""The script that compiles the engine in place."""

from pathlib import Path

import pytest

from subquad.kernels.cpu import build


def test_it_names_what_it_made_and_complains_of_what_it_could_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "build", lambda: build.Built([Path("a/x.so"), Path("b/y.so")], []))
    assert build.main() == 0
    assert capsys.readouterr() == ("x.so\ny.so\n", "")
    monkeypatch.setattr(build, "build", lambda: build.Built([Path("a/x.so")], ["no such header"]))
    assert build.main() == 1
    assert capsys.readouterr() == ("x.so\n", "no such header\n")
