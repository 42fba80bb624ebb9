from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention,
    linear_attention_state,
    linear_attention_state_spec,
)

__all__ = [
    "linear_attention",
    "linear_attention_state",
    "linear_attention_state_spec",
]
