"""Attention layers."""

from keras_efficient_attn.layers.adaptive_computation.layer import (
    AdaptiveComputationTime,
)
from keras_efficient_attn.layers.adaptive_computation.rnn import AdaptiveRNN
from keras_efficient_attn.layers.attention import feature_maps as feature_maps
from keras_efficient_attn.layers.attention.adaptive_span.layer import AdaptiveSpan
from keras_efficient_attn.layers.attention.adaptive_span.trimming import (
    TrimSpans,
    plot_spans,
    trim_spans,
)
from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.feature_maps import (
    FeatureMap,
    register_feature_map,
)
from keras_efficient_attn.layers.attention.fourier import FourierAttention
from keras_efficient_attn.layers.attention.linear.gated.delta import (
    DeltaAttention,
    GatedDeltaAttention,
    KimiDeltaAttention,
)
from keras_efficient_attn.layers.attention.linear.gated.gated_linear import (
    GatedLinearAttention,
)
from keras_efficient_attn.layers.attention.linear.gated.output import (
    OutputGate,
    OutputNorm,
)
from keras_efficient_attn.layers.attention.linear.gated.retention import (
    RetentionAttention,
)
from keras_efficient_attn.layers.attention.linear.layer import LinearAttention
from keras_efficient_attn.layers.attention.linear.performer import PerformerAttention
from keras_efficient_attn.layers.attention.local import LocalAttention
from keras_efficient_attn.layers.attention.reformer import ReformerLSHAttention
from keras_efficient_attn.layers.attention.registry import (
    attention_names,
    get_attention,
    register_attention,
)
from keras_efficient_attn.layers.attention.softmax import SoftmaxAttention
from keras_efficient_attn.layers.attention.sparse import SparseAttention
from keras_efficient_attn.layers.attention.transformer_xl import (
    PositionBiases,
    RelativePositionXL,
)
from keras_efficient_attn.layers.attention.vq.codebooks import CodeOptions
from keras_efficient_attn.layers.attention.vq.layer import VQAttention
from keras_efficient_attn.layers.feed_forward import (
    ChunkedFeedForward,
    ChunkedVocabularyLoss,
)
from keras_efficient_attn.layers.residual.gated import GatedResidual
from keras_efficient_attn.layers.residual.reversible import (
    ReversibleBlock,
    ReversibleStack,
)

__all__ = [
    "AdaptiveComputationTime",
    "AdaptiveRNN",
    "AdaptiveSpan",
    "ChunkedFeedForward",
    "ChunkedVocabularyLoss",
    "CodeOptions",
    "DeltaAttention",
    "EfficientAttention",
    "LocalAttention",
    "FeatureMap",
    "FourierAttention",
    "GatedDeltaAttention",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "OutputGate",
    "OutputNorm",
    "PerformerAttention",
    "GatedResidual",
    "PositionBiases",
    "ReformerLSHAttention",
    "RelativePositionXL",
    "RetentionAttention",
    "ReversibleBlock",
    "ReversibleStack",
    "SoftmaxAttention",
    "SparseAttention",
    "TrimSpans",
    "VQAttention",
    "attention_names",
    "feature_maps",
    "get_attention",
    "plot_spans",
    "register_attention",
    "register_feature_map",
    "trim_spans",
]
