"""A mutant whose text is gone tests nothing: found here, not after an hour of `make mutants`."""

import pytest
from mutant import Mutant
from run import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_still_applies(mutant: Mutant) -> None:
    text = (ROOT / "src" / "subquad" / mutant.path).read_text()
    assert mutant.applied(text) != text


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
