"""Residual connections and norms by name, around each sublayer of a block."""

import dataclasses
from functools import partial

import keras
from keras import ops

from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.layers.residual.gated import GatedResidual
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_rate,
)
from keras_efficient_attn.ops.common.numerics import mean_of_channels, rms_normalize

NORMS = ("layer_norm", "rms_norm")
STREAMS = ("mean", "concatenated")


class LayerNormalization(keras.layers.LayerNormalization):
    """Keras' layer, which on JAX and PyTorch computes in float32 for float64."""

    def call(self, inputs):
        if self.compute_dtype != "float64":
            return super().call(inputs)
        x = inputs - mean_of_channels(inputs)
        x = rms_normalize(x, self.epsilon) * self.gamma
        return x if self.beta is None else x + self.beta


class RMSNormalization(keras.layers.RMSNormalization):
    """Keras' layer, which on JAX and PyTorch computes in float32 for float64."""

    def call(self, inputs):
        if self.compute_dtype != "float64":
            return super().call(inputs)
        return rms_normalize(inputs, self.epsilon) * self.scale


def get_norm(norm, epsilon, use_bias, **kwargs):
    """A normalisation layer.

    Args:
        norm: `"layer_norm"` or `"rms_norm"`.
        epsilon: Added to the variance.
        use_bias: Whether a layer norm has an offset; an RMS norm has none.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: For another name.
    """
    check_name("norm", norm, NORMS)
    if norm == "layer_norm":
        return LayerNormalization(epsilon=epsilon, center=use_bias, **kwargs)
    return RMSNormalization(epsilon=epsilon, **kwargs)


class Residual(keras.layers.Layer):
    """Base of the residual connections: a norm and dropout around a sublayer.

    A block calls `after(x, sublayer(before(x)))`.

    Args:
        norm: `"layer_norm"` or `"rms_norm"`.
        epsilon: Epsilon of the norm.
        use_bias: Whether a layer norm has an offset.
        dropout: Rate of dropout on the sublayer's output.
        layer_dropout: Rate at which a row of the batch skips the sublayer. Defaults to
            0.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, norm, epsilon, use_bias, dropout, layer_dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        check_rate("dropout", dropout)
        check_rate("layer_dropout", layer_dropout)
        self.norm = get_norm(
            norm, epsilon, use_bias, dtype=self.dtype_policy, name="norm"
        )
        self.dropout = keras.layers.Dropout(
            dropout, dtype=self.dtype_policy, name="dropout"
        )
        self.layer_dropout = keras.layers.Dropout(
            layer_dropout,
            noise_shape=(None, 1, 1),
            dtype=self.dtype_policy,
            name="layer_dropout",
        )

    def build(self, input_shape):
        self.norm.build(input_shape)

    def drop(self, update, training):
        """The sublayer's output after dropout."""
        update = self.dropout(update, training=training)
        return self.layer_dropout(update, training=training)

    def before(self, x):
        """The sublayer's input."""
        raise NotImplementedError

    def after(self, x, update, training=None):
        """The connection's output, from the sublayer's output `update`."""
        raise NotImplementedError


class PreNormResidual(Residual):
    """`x + f(norm(x))`; a stack of these needs a final norm."""

    final_norm = True

    def before(self, x):
        return self.norm(x)

    def after(self, x, update, training=None):
        return x + self.drop(update, training)


class PostNormResidual(Residual):
    """`norm(x + f(x))`, as in the original Transformer."""

    final_norm = False

    def before(self, x):
        return x

    def after(self, x, update, training=None):
        return self.norm(x + self.drop(update, training))


class UpdateNormResidual(Residual):
    """`x + norm(f(x))`, as in OLMo 2; a stack of these needs a final norm."""

    final_norm = True

    def before(self, x):
        return x

    def after(self, x, update, training=None):
        return x + self.drop(self.norm(update), training)


class ReversibleResidual(PreNormResidual):
    """`x1 + f(norm(x2))`: two streams that the sublayers update alternately.

    A `TransformerStack` rebuilds its activations in the backward pass from the last
    two streams; see `keras_efficient_attn.layers.ReversibleStack`.
    """


class ReorderedResidual(PreNormResidual):
    """`x + relu(f(norm(x)))`, TrXL-I of GTrXL, without a final norm.

    The gated residuals without their gates, as a baseline.
    """

    final_norm = False

    def after(self, x, update, training=None):
        return super().after(x, ops.relu(update), training=training)


class GatedPreNormResidual(ReorderedResidual):
    """`gate(x, relu(f(norm(x))))`, as in GTrXL.

    Args:
        *args: As `Residual`.
        gate: As `keras_efficient_attn.GatedResidual`, with its bias of 2.
        **kwargs: As `Residual`.
    """

    def __init__(self, *args, gate, **kwargs):
        super().__init__(*args, **kwargs)
        self.residual = GatedResidual(gate, dtype=self.dtype_policy, name="gate")

    def build(self, input_shape):
        super().build(input_shape)
        self.residual.build(input_shape, input_shape)

    def after(self, x, update, training=None):
        update = self.dropout(ops.relu(update), training=training)
        gated = self.residual(x, update)
        if not (training and self.layer_dropout.rate):
            return gated
        # Without an update, a gate still changes the stream.
        return x + self.layer_dropout(gated - x, training=training)


RESIDUALS = {
    "pre_norm": PreNormResidual,
    "post_norm": PostNormResidual,
    "update_norm": UpdateNormResidual,
    "reversible": ReversibleResidual,
    "reordered": ReorderedResidual,
    "gated": partial(GatedPreNormResidual, gate="gru"),
    "gated_input": partial(GatedPreNormResidual, gate="input"),
    "gated_output": partial(GatedPreNormResidual, gate="output"),
    "gated_highway": partial(GatedPreNormResidual, gate="highway"),
    "gated_sigmoid_tanh": partial(GatedPreNormResidual, gate="sigmoid_tanh"),
}


@dataclasses.dataclass(frozen=True)
class ResidualOptions(Options):
    """The residual connections of a backbone, and their norms.

    Args:
        kind: `"pre_norm"` (the default), `"post_norm"`, `"gated"` (of GTrXL, a
            `keras_efficient_attn.GatedResidual` instead of each sum; other gates are
            `"gated_input"`, `"gated_output"`, `"gated_highway"` and
            `"gated_sigmoid_tanh"`), `"reordered"` (the same with sums: TrXL-I), or
            `"reversible"`: two streams whose activations are rebuilt in the backward
            pass, so that memory does not grow with the number of layers
            (`keras_efficient_attn.ReversibleStack`); or `"update_norm"`, `x +
            norm(f(x))` ([OLMo et al., 2024](https://arxiv.org/abs/2501.00656)). Or a
            tuple of these without `"reversible"`, through which the blocks cycle.
        norm: `"layer_norm"` (the default) or `"rms_norm"`.
        norm_epsilon: Added to variances. Defaults to 1e-5.
        layer_dropout: Rate at which a row of the batch goes without a sublayer, and
            its gate, in training (stochastic depth, [Huang et al.,
            2016](https://arxiv.org/abs/1603.09382)). Defaults to 0.
        final_norm: Whether a norm follows the last block. Defaults to `None`: what the
            paper of that block's kind has, which is one except for `"post_norm"`,
            `"reordered"` and the gated kinds.
        output_dropout: Rate of dropout on the output of the last block, after that
            norm. Defaults to 0.
        streams: What becomes of the two streams of `"reversible"` at the end: their
            `"mean"` (the default), or `"concatenated"`, the attention's first, for
            outputs of width `2 · hidden_dim`.

    Raises:
        ValueError: For another name.
    """

    kind: str | tuple = "pre_norm"
    norm: str = "layer_norm"
    norm_epsilon: float = 1e-5
    layer_dropout: float = 0.0
    final_norm: bool | None = None
    output_dropout: float = 0.0
    streams: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.kind, list):
            object.__setattr__(self, "kind", tuple(self.kind))
        for kind in self.kinds:
            check_name("residual", kind, RESIDUALS)
        if not self.kinds or ("reversible" in self.kinds and len(set(self.kinds)) > 1):
            raise ValueError(
                "`residual` must be one kind or a list of kinds, and 'reversible' "
                f"cannot be mixed with others. Received: residual={self.kind!r}"
            )
        check_name("streams", self.streams, STREAMS)
        if self.streams != "mean" and "reversible" not in self.kinds:
            raise ValueError(
                "`streams` needs kind='reversible'. Received: "
                f"streams={self.streams!r}, kind={self.kind!r}"
            )
        check_name("norm", self.norm, NORMS)
        check_rate("layer_dropout", self.layer_dropout)
        check_rate("output_dropout", self.output_dropout)

    @property
    def kinds(self):
        """The kinds of the blocks, through which they cycle."""
        return self.kind if isinstance(self.kind, tuple) else (self.kind,)

    @property
    def width_factor(self):
        """How much wider outputs are than the model."""
        return 1 if self.streams == "mean" else 2
