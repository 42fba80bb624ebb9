"""Vectors that encode the step number of a repeated block."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.models.blocks.positions import sinusoids
from keras_efficient_attn.models.options import check_name

KINDS = ("learned", "sinusoidal")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class TimestepEmbedding(KeepsArguments, keras.layers.Layer):
    """Adds a vector for the step number to all positions.

    Args:
        num_steps: Number of steps.
        kind: `"learned"` (the default), a learned vector for each step, or
            `"sinusoidal"`: sines and cosines of the step number.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        step: Number of the step, from 0: an integer or a scalar tensor.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: For an unknown `kind`.

    Reference:
        - [Dehghani et al., 2019](https://arxiv.org/abs/1807.03819)
    """

    def __init__(self, num_steps, kind="learned", **kwargs):
        super().__init__(**kwargs)
        check_name("timestep_embedding", kind, KINDS)
        self.keep(locals())

    def build(self, x_shape, step_shape=None):
        if self.kind == "learned":
            self.table = self.add_weight(
                name="table",
                shape=(self.num_steps, x_shape[-1]),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
            )

    def call(self, x, step):
        if self.kind == "learned":
            return x + ops.take(self.table, step, axis=0)
        vector = sinusoids(step, x.shape[-1])
        return x + ops.cast(vector, x.dtype)

    def compute_output_shape(self, x_shape, step_shape=None):
        return x_shape
