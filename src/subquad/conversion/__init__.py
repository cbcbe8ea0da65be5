"""Pretrained Hugging Face models with another attention; importing this lets the Auto classes load saved ones."""

from subquad.checks.extras import extra

with extra("subquad.conversion", "models"):
    from subquad.conversion.saved import ConvertedConfig, load
from subquad.conversion.swap import swap_attention

__all__ = ["ConvertedConfig", "load", "swap_attention"]
