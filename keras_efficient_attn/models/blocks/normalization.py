"""Normalisation layers by name."""

import keras

from keras_efficient_attn.models.options import check_name

NORMS = ("layer_norm", "rms_norm")


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
        return keras.layers.LayerNormalization(
            epsilon=epsilon, center=use_bias, **kwargs
        )
    return keras.layers.RMSNormalization(epsilon=epsilon, **kwargs)
