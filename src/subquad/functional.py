"""Attention as functions."""

from subquad.mechanisms.cluster import cluster_attention
from subquad.mechanisms.favor import favor_attention
from subquad.mechanisms.linear import linear_attention
from subquad.mechanisms.lsh import draw_rotations, lsh_attention
from subquad.mechanisms.softmax import softmax_attention

__all__ = [
    "cluster_attention",
    "draw_rotations",
    "favor_attention",
    "linear_attention",
    "lsh_attention",
    "softmax_attention",
]
