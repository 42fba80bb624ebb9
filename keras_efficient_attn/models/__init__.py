"""Models on KerasHub: a backbone for every attention layer, tasks, and conversion.

Importing this module imports KerasHub; importing `keras_efficient_attn` does not.
"""

from keras_efficient_attn.models.auxiliary_losses import AuxiliaryLosses
from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.blocks.attention import (
    gated_attention_units,
)
from keras_efficient_attn.models.blocks.convolution import (
    CausalConvolution,
    SeparableConvolution,
)
from keras_efficient_attn.models.blocks.feed_forward import (
    FeedForward,
    FeedForwardOptions,
)
from keras_efficient_attn.models.blocks.input_embedding import EmbeddingOptions
from keras_efficient_attn.models.blocks.positions import (
    AxialPositions,
    LearnedPositions,
    PositionOptions,
    SinusoidalPositions,
)
from keras_efficient_attn.models.blocks.residual import ResidualOptions
from keras_efficient_attn.models.blocks.transformer_block import TransformerBlock
from keras_efficient_attn.models.blocks.transformer_stack import TransformerStack
from keras_efficient_attn.models.conversion import (
    convert_backbone,
    distill,
    efficient_backbone,
    replace_attention,
    swap_report,
)
from keras_efficient_attn.models.conversion.accelerate import accelerate
from keras_efficient_attn.models.files import preset_names
from keras_efficient_attn.models.tasks.byte_tokenizer import EfficientByteTokenizer
from keras_efficient_attn.models.tasks.causal_lm import (
    EfficientCausalLM,
    EfficientCausalLMPreprocessor,
)
from keras_efficient_attn.models.tasks.masked_lm import (
    EfficientMaskedLM,
    EfficientMaskedLMPreprocessor,
)
from keras_efficient_attn.models.tasks.seq_2_seq_lm import (
    EfficientSeq2SeqLM,
    EfficientSeq2SeqLMPreprocessor,
)
from keras_efficient_attn.models.tasks.text_classifier import (
    EfficientTextClassifier,
    EfficientTextClassifierPreprocessor,
)
from keras_efficient_attn.models.transformer_xl import Segments, TransformerXL
from keras_efficient_attn.models.universal_transformer import (
    RecurrenceOptions,
    UniversalTransformer,
)

__all__ = [
    "AuxiliaryLosses",
    "AxialPositions",
    "CausalConvolution",
    "EfficientByteTokenizer",
    "EfficientCausalLM",
    "EfficientCausalLMPreprocessor",
    "EfficientMaskedLM",
    "EfficientMaskedLMPreprocessor",
    "EfficientSeq2SeqLM",
    "EfficientSeq2SeqLMPreprocessor",
    "EfficientTextClassifier",
    "EfficientTextClassifierPreprocessor",
    "EfficientTransformerBackbone",
    "EmbeddingOptions",
    "FeedForward",
    "FeedForwardOptions",
    "LearnedPositions",
    "PositionOptions",
    "RecurrenceOptions",
    "ResidualOptions",
    "Segments",
    "SeparableConvolution",
    "SinusoidalPositions",
    "TransformerBlock",
    "TransformerStack",
    "TransformerXL",
    "UniversalTransformer",
    "accelerate",
    "convert_backbone",
    "distill",
    "efficient_backbone",
    "gated_attention_units",
    "preset_names",
    "replace_attention",
    "swap_report",
]
