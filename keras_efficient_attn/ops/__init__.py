"""Pure functions on tensors: the algorithms of the layers, without weights."""

from keras_efficient_attn.ops import feature_maps as feature_maps
from keras_efficient_attn.ops import random_features as random_features
from keras_efficient_attn.ops.linear_attention import (
    linear_attention,
    linear_attention_state,
)

__all__ = [
    "feature_maps",
    "linear_attention",
    "linear_attention_state",
    "random_features",
]
