"""Normalisation layers by name."""

import keras

NORMS = ("layer_norm", "rms_norm")


def get_norm(norm, epsilon, use_bias, **kwargs):
    """A normalisation layer.

    Args:
        norm: `"layer_norm"` or `"rms_norm"`.
        epsilon: Added to the variance.
        use_bias: Whether a layer norm has an offset; an RMS norm has none.
        **kwargs: Those of `keras.layers.Layer`.

    Raises:
        ValueError: For another name.
    """
    if norm == "layer_norm":
        return keras.layers.LayerNormalization(
            epsilon=epsilon, center=use_bias, **kwargs
        )
    if norm == "rms_norm":
        return keras.layers.RMSNormalization(epsilon=epsilon, **kwargs)
    raise ValueError(
        f"`norm` must be one of {', '.join(NORMS)}. Received: norm={norm!r}"
    )
