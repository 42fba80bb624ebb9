"""Normalisation layers by name."""

import keras

from keras_efficient_attn.models.options import check_name
from keras_efficient_attn.ops.common.numerics import mean_of_channels, rms_normalize

NORMS = ("layer_norm", "rms_norm")


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
