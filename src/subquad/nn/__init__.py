"""Layers around a mechanism: drop-in replacements for torch's, and the blocks of `subquad.models`."""

from subquad.nn.block import MLP, Block
from subquad.nn.encoder_layer import TransformerEncoderLayer
from subquad.nn.longformer import LongformerSelfAttention
from subquad.nn.multihead import MultiheadAttention
from subquad.nn.positions import Rotation, rotation, sinusoidal
from subquad.nn.reversible import reversible
from subquad.nn.self_attention import Context, LayerState, SelfAttention, layer_mechanism, layer_seed
from subquad.nn.short_convolution import ShortConvolution

__all__ = [
    "MLP",
    "Block",
    "Context",
    "LayerState",
    "LongformerSelfAttention",
    "MultiheadAttention",
    "Rotation",
    "SelfAttention",
    "ShortConvolution",
    "TransformerEncoderLayer",
    "layer_mechanism",
    "layer_seed",
    "reversible",
    "rotation",
    "sinusoidal",
]
