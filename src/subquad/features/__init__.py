"""What turns queries and keys into features."""

from subquad.features.positive import FeatureMap, draw_feature_map, positive_map
from subquad.features.proposals import Proposal

__all__ = ["FeatureMap", "Proposal", "draw_feature_map", "positive_map"]
