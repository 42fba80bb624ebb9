"""Residual connections by name: what stands around each sublayer of a block."""

import keras
from keras import ops

from keras_efficient_attn.layers import GatedResidual
from keras_efficient_attn.models.blocks.normalization import get_norm


class Residual(keras.layers.Layer):
    """Base of the residual connections: a norm and dropout around a sublayer.

    A block calls `after(x, sublayer(before(x)))`.

    Args:
        norm: `"layer_norm"` or `"rms_norm"`.
        epsilon: Of the norm.
        use_bias: Whether a layer norm has an offset.
        dropout: Rate of dropout on the sublayer's output.
        **kwargs: Those of `keras.layers.Layer`.
    """

    def __init__(self, norm, epsilon, use_bias, dropout, **kwargs):
        super().__init__(**kwargs)
        self.norm = get_norm(
            norm, epsilon, use_bias, dtype=self.dtype_policy, name="norm"
        )
        self.dropout = keras.layers.Dropout(
            dropout, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        self.norm.build(input_shape)

    def before(self, x):
        """The sublayer's input."""
        raise NotImplementedError

    def after(self, x, update, training=None):
        """The connection's output, from the sublayer's output `update`."""
        raise NotImplementedError


class PreNormResidual(Residual):
    """`x + f(norm(x))`; a stack of them needs a norm at its end."""

    final_norm = True

    def before(self, x):
        return self.norm(x)

    def after(self, x, update, training=None):
        return x + self.dropout(update, training=training)


class PostNormResidual(Residual):
    """`norm(x + f(x))`, of the first Transformer."""

    final_norm = False

    def before(self, x):
        return x

    def after(self, x, update, training=None):
        return self.norm(x + self.dropout(update, training=training))


class ReversibleResidual(PreNormResidual):
    """`x1 + f(norm(x2))`: of two streams that the sublayers update in turns.

    A `TransformerStack` rebuilds its activations in the backward pass from the last
    two streams; see `keras_efficient_attn.layers.ReversibleStack`.
    """


class GruResidual(PreNormResidual):
    """`gate(x, relu(f(norm(x))))`, of GTrXL; no norm stands at the end of a stack.

    The gate is that of `keras_efficient_attn.GatedResidual`, with its bias of 2.
    """

    gate = "gru"
    final_norm = False

    def build(self, input_shape):
        super().build(input_shape)
        self.residual = GatedResidual(self.gate, dtype=self.dtype_policy, name="gate")
        self.residual.build(input_shape, input_shape)

    def after(self, x, update, training=None):
        update = self.dropout(ops.relu(update), training=training)
        return self.residual(x, update)


class InputGateResidual(GruResidual):
    """`GruResidual` with the gate `"input"`."""

    gate = "input"


class OutputGateResidual(GruResidual):
    """`GruResidual` with the gate `"output"`."""

    gate = "output"


class HighwayResidual(GruResidual):
    """`GruResidual` with the gate `"highway"`."""

    gate = "highway"


class SigmoidTanhResidual(GruResidual):
    """`GruResidual` with the gate `"sigmoid_tanh"`."""

    gate = "sigmoid_tanh"


RESIDUALS = {
    "pre_norm": PreNormResidual,
    "post_norm": PostNormResidual,
    "reversible": ReversibleResidual,
    "gated": GruResidual,
    "gated_input": InputGateResidual,
    "gated_output": OutputGateResidual,
    "gated_highway": HighwayResidual,
    "gated_sigmoid_tanh": SigmoidTanhResidual,
}


def get_residual_class(residual):
    """The class of a residual connection.

    Raises:
        ValueError: If `residual` is not a name in `RESIDUALS`.
    """
    if residual not in RESIDUALS:
        raise ValueError(
            f"`residual` must be one of {', '.join(RESIDUALS)}. Received: "
            f"residual={residual!r}"
        )
    return RESIDUALS[residual]
