"""Efficient attention in models that were trained with softmax attention."""

from keras_efficient_attn.models.swap.backbone import (
    convert_backbone,
    efficient_backbone,
)
from keras_efficient_attn.models.swap.replace import replace_attention
from keras_efficient_attn.models.swap.report import LayerError, SwapReport, swap_report

__all__ = [
    "LayerError",
    "SwapReport",
    "convert_backbone",
    "efficient_backbone",
    "replace_attention",
    "swap_report",
]
