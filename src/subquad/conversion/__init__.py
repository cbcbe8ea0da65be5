"""Pretrained Hugging Face models with another attention; importing this lets the Auto classes load saved ones."""

from subquad.checks.extras import extra

with extra("subquad.conversion", "models"):
    from subquad.conversion.saved import ConvertedConfig, load
from subquad.conversion.converting import convert
from subquad.conversion.policy import Conversion
from subquad.conversion.swap import swap_attention

__all__ = ["Conversion", "ConvertedConfig", "convert", "load", "swap_attention"]
