"""The language model: KerasHub's causal language model on this package's backbone."""

import math

import keras

from command_line import UsageError, check_heads
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.models import EfficientCausalLM, EfficientTransformerBackbone

NUM_BYTES = 256
# The options of `build_model` that the command line names alike.
OPTIONS = ("layers", "dim", "heads", "feed_forward", "convolution", "residual")
# Widths of feed-forward networks are multiples of this one.
WIDTH_UNIT = 8


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


def build_model(
    attention,
    layers,
    dim,
    heads,
    feed_forward=None,
    convolution=0,
    residual="pre_norm",
):
    """A causal language model from bytes to float32 logits.

    Blocks of attention and feed-forward network. The model has no positions of its own:
    they are the attention's, as its decays or `rotary_wavelength`, or the
    convolution's.

    Args:
        attention: As for `--attention`.
        layers: Number of blocks.
        dim: Width.
        heads: Attention heads of each block.
        feed_forward: Width of the feed-forward networks. Defaults to `4 * dim`.
        convolution: Bytes that a convolution before each attention reaches. Defaults
            to 0: no convolution.
        residual: As for the backbone. Defaults to `"pre_norm"`.
    """
    check_attention(attention, dim, heads)
    backbone = EfficientTransformerBackbone(
        vocabulary_size=NUM_BYTES,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=dim,
        intermediate_dim=feed_forward or 4 * dim,
        attention=attention,
        residual=residual,
        feed_forward="squared_relu",
        use_bias=False,
        convolution=convolution or None,
        embedding="untied",
    )
    return EfficientCausalLM(backbone)


def equal_widths(attentions, options):
    """Widths of feed-forward networks that give models the parameters of the largest.

    Args:
        attentions: As for `--attention`, one for each model.
        options: The other options of `build_model`, a dict.

    Returns:
        Dict of widths by attention.
    """
    width = options["feed_forward"] or 4 * options["dim"]
    counts = {
        attention: trained_parameters(build_model(attention, **options))
        for attention in attentions
    }
    # A row and a column of each block.
    unit = WIDTH_UNIT * 2 * options["dim"] * options["layers"]
    return {
        attention: width + WIDTH_UNIT * round((max(counts.values()) - count) / unit)
        for attention, count in counts.items()
    }


def trained_parameters(model):
    """The number of trainable weights: statistics, as of codes, do not count."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)
