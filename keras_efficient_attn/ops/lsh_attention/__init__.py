from keras_efficient_attn.ops.lsh_attention.api import (
    lsh_attention,
)
from keras_efficient_attn.ops.lsh_attention.streaming import (
    lsh_attention_state,
)

__all__ = [
    "lsh_attention",
    "lsh_attention_state",
]
