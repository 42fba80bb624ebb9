"""The language model: KerasHub's causal language model on this package's backbone."""

import math

import keras

from byte_lm.hashed_ngrams import HashedNGrams
from byte_lm.ngram_recall import NGramRecall
from command_line import UsageError, check_heads
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    EmbeddingOptions,
)

NUM_BYTES = 256


@keras.saving.register_keras_serializable(package="byte_lm")
class BitsPerByte(keras.metrics.MeanMetricWrapper):
    """Mean cross-entropy of byte logits, in bits: `-log2 p(byte)`."""

    def __init__(self, name="bits_per_byte", dtype=None):
        super().__init__(_bits, name=name, dtype=dtype)
        self._direction = "down"

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


def _bits(y_true, y_pred):
    nats = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    return nats / math.log(2)


def check_attention(spec, dim, heads):
    """Raises `UsageError` if no model of these sizes has this attention.

    Args:
        spec: As `--attention`: `"name"` or `"name:option=value,option=value"`.
        dim: Width of the model.
        heads: Number of heads.
    """
    check_heads(dim, heads)
    try:
        layer = get_attention(spec, num_heads=heads, key_dim=dim // heads)
        x = keras.KerasTensor((1, 8, dim))
        layer.build(x.shape, x.shape)
        # Not by a call, because Keras makes its errors longer.
        layer.compute_output_spec(x, x, use_causal_mask=True)
        # Samples are streamed.
        layer.get_initial_state(1, 8 if layer.state_grows else None)
    except ValueError as error:
        raise UsageError(f"--attention {error}") from error


def build_model(attention, layers, dim, heads, residual="pre_norm"):
    """A causal language model from bytes to float32 logits.

    Blocks of attention and feed-forward network. N-grams and short convolutions encode
    the order of the bytes at any length, so that the context has no limit. With hashed
    n-grams the blocks need not learn spelling; with recalled n-grams they need not
    learn to look up earlier text.

    Args:
        attention: As for `--attention`.
        layers: Number of blocks.
        dim: Width.
        heads: Attention heads of each block.
        residual: As for the backbone. Defaults to `"pre_norm"`.
    """
    check_attention(attention, dim, heads)
    backbone = EfficientTransformerBackbone(
        vocabulary_size=NUM_BYTES,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=dim,
        intermediate_dim=4 * dim,
        attention=attention,
        residual=residual,
        feed_forward="squared_relu",
        use_bias=False,
        convolution=4,
        embedding=EmbeddingOptions(
            "untied",
            features=(
                HashedNGrams(dim, rows=128 * dim, name="ngrams"),
                NGramRecall(NUM_BYTES, dim, name="recall"),
            ),
        ),
    )
    return EfficientCausalLM(backbone)
