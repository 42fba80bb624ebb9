"""Attention layers."""

from keras_efficient_attn.layers.efficient_attention import EfficientAttention
from keras_efficient_attn.layers.performer_attention import PerformerAttention

__all__ = ["EfficientAttention", "PerformerAttention"]
