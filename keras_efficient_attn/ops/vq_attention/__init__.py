from keras_efficient_attn.ops.vq_attention.api import (
    vq_attention,
    vq_attention_state,
)
from keras_efficient_attn.ops.vq_attention.codebook import soft_codes

__all__ = [
    "soft_codes",
    "vq_attention",
    "vq_attention_state",
]
