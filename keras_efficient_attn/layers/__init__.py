"""Attention layers."""

from keras_efficient_attn.layers.by_name import attention_names, get_attention
from keras_efficient_attn.layers.efficient_attention import EfficientAttention
from keras_efficient_attn.layers.performer_attention import PerformerAttention
from keras_efficient_attn.layers.softmax_attention import SoftmaxAttention

__all__ = [
    "EfficientAttention",
    "PerformerAttention",
    "SoftmaxAttention",
    "attention_names",
    "get_attention",
]
