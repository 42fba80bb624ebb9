"""Attention layers."""

from keras_efficient_attn.layers.by_name import attention_names, get_attention
from keras_efficient_attn.layers.efficient_attention import EfficientAttention
from keras_efficient_attn.layers.performer_attention import PerformerAttention

__all__ = [
    "EfficientAttention",
    "PerformerAttention",
    "attention_names",
    "get_attention",
]
