"""Residual connections by name: what stands around each sublayer of a block."""

import dataclasses
from functools import partial

import keras
from keras import ops

from keras_efficient_attn.layers.residual.gated import GatedResidual
from keras_efficient_attn.models.blocks.normalization import NORMS, get_norm
from keras_efficient_attn.models.options import Options, check_name


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


class ReorderedResidual(PreNormResidual):
    """`x + relu(f(norm(x)))`, TrXL-I of GTrXL; no norm stands at the end of a stack.

    The gated residuals without their gates: what these are compared with.
    """

    final_norm = False

    def after(self, x, update, training=None):
        return super().after(x, ops.relu(update), training=training)


class GatedPreNormResidual(ReorderedResidual):
    """`gate(x, relu(f(norm(x))))`, of GTrXL.

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
        return self.residual(x, update)


RESIDUALS = {
    "pre_norm": PreNormResidual,
    "post_norm": PostNormResidual,
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
            `keras_efficient_attn.GatedResidual` in the place of each sum; other gates
            are `"gated_input"`, `"gated_output"`, `"gated_highway"` and
            `"gated_sigmoid_tanh"`), `"reordered"` (the same with sums: TrXL-I), or
            `"reversible"`: two streams, whose activations are rebuilt in the backward
            pass, for memory that does not grow with the number of layers
            (`keras_efficient_attn.ReversibleStack`).
        norm: `"layer_norm"` (the default) or `"rms_norm"`.
        norm_epsilon: Added to variances. Defaults to 1e-5.

    Raises:
        ValueError: For another name.
    """

    kind: str = "pre_norm"
    norm: str = "layer_norm"
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        check_name("residual", self.kind, RESIDUALS)
        check_name("norm", self.norm, NORMS)


def get_residual(residual, norm, epsilon, use_bias, dropout, **kwargs):
    """A residual connection.

    Args:
        residual: One of the names in `RESIDUALS`.
        norm, epsilon, use_bias, dropout: As `Residual`.
        **kwargs: Those of `keras.layers.Layer`.

    Raises:
        ValueError: For another name.
    """
    check_name("residual", residual, RESIDUALS)
    return RESIDUALS[residual](norm, epsilon, use_bias, dropout, **kwargs)
