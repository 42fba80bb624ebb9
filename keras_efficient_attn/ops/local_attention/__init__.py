from keras_efficient_attn.ops.local_attention.api import (
    local_attention,
    local_attention_state,
    local_pattern,
)

__all__ = [
    "local_attention",
    "local_attention_state",
    "local_pattern",
]
