"""Models on KerasHub: a backbone for every attention layer, its tasks, and swapping.

Importing this module imports KerasHub; importing `keras_efficient_attn` does not.
"""

from keras_efficient_attn.models.auxiliary_losses import AuxiliaryLosses
from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.byte_tokenizer import (
    EfficientByteTokenizer,
    EfficientCausalLMPreprocessor,
)
from keras_efficient_attn.models.causal_lm import EfficientCausalLM
from keras_efficient_attn.models.convolution import CausalConvolution
from keras_efficient_attn.models.feed_forward import FeedForward
from keras_efficient_attn.models.hashed_ngrams import HashedNGrams
from keras_efficient_attn.models.masked_lm import (
    EfficientMaskedLM,
    EfficientMaskedLMPreprocessor,
)
from keras_efficient_attn.models.ngram_recall import NGramRecall
from keras_efficient_attn.models.positions import (
    LearnedPositions,
    SinusoidalPositions,
)
from keras_efficient_attn.models.presets import preset_names
from keras_efficient_attn.models.segments import Segments
from keras_efficient_attn.models.separable_convolution import SeparableConvolution
from keras_efficient_attn.models.swap import (
    convert_backbone,
    efficient_backbone,
    replace_attention,
    swap_report,
)
from keras_efficient_attn.models.text_classifier import (
    EfficientTextClassifier,
    EfficientTextClassifierPreprocessor,
)
from keras_efficient_attn.models.transformer_block import TransformerBlock
from keras_efficient_attn.models.transformer_stack import TransformerStack
from keras_efficient_attn.models.transformer_xl import TransformerXL
from keras_efficient_attn.models.universal_transformer import UniversalTransformer

__all__ = [
    "AuxiliaryLosses",
    "CausalConvolution",
    "EfficientByteTokenizer",
    "EfficientCausalLM",
    "EfficientCausalLMPreprocessor",
    "EfficientMaskedLM",
    "EfficientMaskedLMPreprocessor",
    "EfficientTextClassifier",
    "EfficientTextClassifierPreprocessor",
    "EfficientTransformerBackbone",
    "FeedForward",
    "HashedNGrams",
    "LearnedPositions",
    "NGramRecall",
    "Segments",
    "SeparableConvolution",
    "SinusoidalPositions",
    "TransformerBlock",
    "TransformerStack",
    "TransformerXL",
    "UniversalTransformer",
    "convert_backbone",
    "efficient_backbone",
    "preset_names",
    "replace_attention",
    "swap_report",
]
