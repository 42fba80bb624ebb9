"""Pure functions on tensors: the algorithms of the layers, without weights."""

from keras_efficient_attn.ops import fourier as fourier
from keras_efficient_attn.ops.adaptive_computation import adaptive_computation
from keras_efficient_attn.ops.adaptive_span import (
    adaptive_span_attention,
    adaptive_span_state,
)
from keras_efficient_attn.ops.chunked_cross_entropy import chunked_cross_entropy
from keras_efficient_attn.ops.common import random_features as random_features
from keras_efficient_attn.ops.linear_attention import (
    feature_maps as feature_maps,
)
from keras_efficient_attn.ops.linear_attention import (
    linear_attention,
    linear_attention_state,
    linear_attention_state_spec,
)
from keras_efficient_attn.ops.local_attention import (
    local_attention,
    local_attention_state,
    local_pattern,
)
from keras_efficient_attn.ops.lsh_attention import (
    lsh_attention,
    lsh_attention_state,
)
from keras_efficient_attn.ops.relative_attention import relative_attention
from keras_efficient_attn.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_state,
    sparse_pattern,
)
from keras_efficient_attn.ops.vq_attention import (
    soft_codes,
    vq_attention,
    vq_attention_state,
)

__all__ = [
    "adaptive_computation",
    "adaptive_span_attention",
    "adaptive_span_state",
    "chunked_cross_entropy",
    "feature_maps",
    "fourier",
    "linear_attention",
    "linear_attention_state",
    "linear_attention_state_spec",
    "local_attention",
    "local_attention_state",
    "local_pattern",
    "lsh_attention",
    "lsh_attention_state",
    "random_features",
    "relative_attention",
    "soft_codes",
    "sparse_attention",
    "sparse_attention_state",
    "sparse_pattern",
    "vq_attention",
    "vq_attention_state",
]
