"""Converts models trained with softmax attention to efficient attention."""

from keras_efficient_attn.models.conversion.backbone import (
    convert_backbone,
    efficient_backbone,
)
from keras_efficient_attn.models.conversion.distill import distill
from keras_efficient_attn.models.conversion.replace import replace_attention
from keras_efficient_attn.models.conversion.report import (
    LayerError,
    PathError,
    SwapReport,
    swap_report,
)

__all__ = [
    "LayerError",
    "PathError",
    "SwapReport",
    "convert_backbone",
    "distill",
    "efficient_backbone",
    "replace_attention",
    "swap_report",
]
