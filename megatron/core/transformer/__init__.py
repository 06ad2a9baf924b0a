"""Transformer layers: norm, rotary embedding, attention, MLP, layer, block, recompute."""

from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.rotary import RotaryEmbedding, RotaryTable

__all__ = [
    "LayerInputs",
    "RotaryEmbedding",
    "RotaryTable",
    "TransformerBlock",
    "TransformerLayer",
]
