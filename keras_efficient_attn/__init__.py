"""Efficient attention layers for Keras 3."""

from keras_efficient_attn import layers as layers
from keras_efficient_attn import ops as ops
from keras_efficient_attn.layers import (
    EfficientAttention,
    PerformerAttention,
    SoftmaxAttention,
)

__version__ = "0.1.0"

__all__ = [
    "EfficientAttention",
    "PerformerAttention",
    "SoftmaxAttention",
    "layers",
    "ops",
]
