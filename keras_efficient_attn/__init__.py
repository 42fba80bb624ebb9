"""Efficient attention layers for Keras 3."""

import importlib

from keras_efficient_attn import distribution as distribution
from keras_efficient_attn import layers as layers
from keras_efficient_attn import ops as ops
from keras_efficient_attn.layers import (
    AdaptiveComputationTime,
    AdaptiveRNN,
    AdaptiveSpan,
    ChunkedFeedForward,
    ChunkedVocabularyLoss,
    DeltaAttention,
    EfficientAttention,
    FourierAttention,
    GatedDeltaAttention,
    GatedLinearAttention,
    GatedResidual,
    KimiDeltaAttention,
    LinearAttention,
    LocalAttention,
    PerformerAttention,
    PositionBiases,
    ReformerLSHAttention,
    RelativePositionXL,
    RetentionAttention,
    ReversibleBlock,
    ReversibleStack,
    SoftmaxAttention,
    SparseAttention,
    VQAttention,
)

__version__ = "0.1.0"

__all__ = [
    "AdaptiveComputationTime",
    "AdaptiveRNN",
    "AdaptiveSpan",
    "ChunkedFeedForward",
    "ChunkedVocabularyLoss",
    "DeltaAttention",
    "EfficientAttention",
    "GatedDeltaAttention",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "LocalAttention",
    "FourierAttention",
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
    "VQAttention",
]


def __getattr__(name):
    # Loaded on first use: the models import KerasHub.
    if name in ("benchmark", "models"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
