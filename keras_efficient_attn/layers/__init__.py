"""Attention layers."""

from keras_efficient_attn.layers.adaptive_computation_time import (
    AdaptiveComputationTime,
)
from keras_efficient_attn.layers.adaptive_rnn import AdaptiveRNN
from keras_efficient_attn.layers.adaptive_span import AdaptiveSpan
from keras_efficient_attn.layers.by_name import attention_names, get_attention
from keras_efficient_attn.layers.chunked_feed_forward import (
    ChunkedFeedForward,
    ChunkedVocabularyLoss,
)
from keras_efficient_attn.layers.efficient_attention import EfficientAttention
from keras_efficient_attn.layers.fourier_attention import FourierAttention
from keras_efficient_attn.layers.gated_residual import GatedResidual
from keras_efficient_attn.layers.local_attention import LocalAttention
from keras_efficient_attn.layers.performer_attention import PerformerAttention
from keras_efficient_attn.layers.reformer_lsh_attention import ReformerLSHAttention
from keras_efficient_attn.layers.relative_position_xl import (
    PositionBiases,
    RelativePositionXL,
)
from keras_efficient_attn.layers.reversible import ReversibleBlock, ReversibleStack
from keras_efficient_attn.layers.softmax_attention import SoftmaxAttention
from keras_efficient_attn.layers.span_plot import plot_spans
from keras_efficient_attn.layers.span_trimming import TrimSpans, trim_spans
from keras_efficient_attn.layers.sparse_attention import SparseAttention
from keras_efficient_attn.layers.vq_attention import VQAttention

__all__ = [
    "AdaptiveComputationTime",
    "AdaptiveRNN",
    "AdaptiveSpan",
    "ChunkedFeedForward",
    "ChunkedVocabularyLoss",
    "EfficientAttention",
    "LocalAttention",
    "FourierAttention",
    "PerformerAttention",
    "GatedResidual",
    "PositionBiases",
    "ReformerLSHAttention",
    "RelativePositionXL",
    "ReversibleBlock",
    "ReversibleStack",
    "SoftmaxAttention",
    "SparseAttention",
    "TrimSpans",
    "VQAttention",
    "attention_names",
    "get_attention",
    "plot_spans",
    "trim_spans",
]
