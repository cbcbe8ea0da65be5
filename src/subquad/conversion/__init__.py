"""Pretrained Hugging Face models with another attention."""

from subquad.conversion.swap import swap_attention

__all__ = ["swap_attention"]
