"""Modules made on the meta device, and brought to life."""

from collections.abc import Callable

import pytest
import torch

from subquad import FavorAttention, LinearAttention, Mechanism

MADE: dict[str, Callable[[], Mechanism]] = {
    "favor": lambda: FavorAttention(8, 16, seed=1),
    "linear with a projection": lambda: LinearAttention(8, num_features=16, feature_map="relu", seed=1),
    "linear": lambda: LinearAttention(8),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_reset_parameters_makes_what_the_constructor_makes(make: Callable[[], Mechanism]) -> None:
    with torch.device("meta"):
        made = make()
    assert all(tensor.device.type == "meta" for tensor in made.state_dict().values())
    alive, wanted = made.to_empty(device="cpu"), make()
    alive.reset_parameters()  # pyright: ignore
    assert alive.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(alive.state_dict()[name], tensor), name
