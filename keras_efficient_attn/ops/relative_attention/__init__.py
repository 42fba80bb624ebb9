from keras_efficient_attn.ops.relative_attention.api import (
    relative_attention,
)

__all__ = [
    "relative_attention",
]
