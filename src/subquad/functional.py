"""Attention as functions."""

from subquad.mechanisms.favor import favor_attention
from subquad.mechanisms.linear import linear_attention
from subquad.mechanisms.softmax import softmax_attention
from subquad.mechanisms.strided import strided_attention

__all__ = ["favor_attention", "linear_attention", "softmax_attention", "strided_attention"]
