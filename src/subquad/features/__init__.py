"""What turns queries and keys into features."""

from subquad.features.positive import FeatureMap, draw_feature_map, positive_map

__all__ = ["FeatureMap", "draw_feature_map", "positive_map"]
