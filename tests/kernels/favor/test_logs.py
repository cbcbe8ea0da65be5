"""Logarithms of features, as the torch engine keeps them."""

import torch

from subquad.features import draw_feature_map
from subquad.kernels.favor.logs import LogFeatures


def test_room_for_gradients_is_made_only_where_they_are_wanted() -> None:
    map_ = draw_feature_map(4, 6, num_heads=2)
    assert LogFeatures(map_, torch.float64, False).gradients is None  # decoding wants none
    wanted = LogFeatures(map_, torch.float64, False, want_gradients=True).gradients
    assert wanted is not None
    assert [tuple(t.shape) for t in wanted.values()] == [(2, 6, 4), (2, 6, 4), (2, 6), (0,), (0,)]
    assert all(t.dtype == torch.float64 and not t.any() for t in wanted.values())
