from keras_efficient_attn.ops.vq_attention.api import (
    vq_attention,
    vq_attention_state,
)

__all__ = [
    "vq_attention",
    "vq_attention_state",
]
