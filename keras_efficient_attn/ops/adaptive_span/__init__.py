from keras_efficient_attn.ops.adaptive_span.api import (
    adaptive_span_attention,
    adaptive_span_state,
)

__all__ = [
    "adaptive_span_attention",
    "adaptive_span_state",
]
