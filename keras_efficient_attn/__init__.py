"""Efficient attention layers for Keras 3."""

import importlib

from keras_efficient_attn import layers as layers, ops as ops
from keras_efficient_attn.layers import (
    AdaptiveComputationTime as AdaptiveComputationTime,
    AdaptiveRNN as AdaptiveRNN,
    AdaptiveSpan as AdaptiveSpan,
    ChunkedFeedForward as ChunkedFeedForward,
    ChunkedVocabularyLoss as ChunkedVocabularyLoss,
    EfficientAttention as EfficientAttention,
    FourierAttention as FourierAttention,
    GatedResidual as GatedResidual,
    LinearAttention as LinearAttention,
    LocalAttention as LocalAttention,
    PerformerAttention as PerformerAttention,
    PositionBiases as PositionBiases,
    ReformerLSHAttention as ReformerLSHAttention,
    RelativePositionXL as RelativePositionXL,
    ReversibleBlock as ReversibleBlock,
    ReversibleStack as ReversibleStack,
    SoftmaxAttention as SoftmaxAttention,
    SparseAttention as SparseAttention,
    VQAttention as VQAttention,
)

__version__ = "0.1.0"


def __getattr__(name):
    # Loaded when first used: the models import KerasHub.
    if name in ("benchmark", "models"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
