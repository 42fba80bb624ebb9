from keras_efficient_attn.ops.sparse_attention.api import (
    sparse_attention,
    sparse_attention_state,
    sparse_pattern,
)

__all__ = [
    "sparse_attention",
    "sparse_attention_state",
    "sparse_pattern",
]
