"""Attention as functions."""

from subquad.mechanisms.cluster import cluster_attention
from subquad.mechanisms.favor import favor_attention
from subquad.mechanisms.linear import linear_attention
from subquad.mechanisms.linformer import linformer_attention
from subquad.mechanisms.lsh import draw_rotations, lsh_attention
from subquad.mechanisms.pages import pages_attention
from subquad.mechanisms.softmax import softmax_attention
from subquad.mechanisms.strided import strided_attention
from subquad.mechanisms.window import window_attention

__all__ = [
    "cluster_attention",
    "draw_rotations",
    "favor_attention",
    "linear_attention",
    "linformer_attention",
    "lsh_attention",
    "pages_attention",
    "softmax_attention",
    "strided_attention",
    "window_attention",
]
