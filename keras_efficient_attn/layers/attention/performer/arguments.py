"""The arguments of `PerformerAttention`: what there is, and what goes together."""

import keras

from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_positive_number,
    check_rotary_wavelength,
)

RANDOM_MAPS = ("favor+", "hyperbolic", "favor++", "trigonometric")
POLYNOMIAL_MAPS = ("taylor", "power")
ELEMENTWISE_MAPS = ("relu", "elu", "softmax")
FEATURE_MAPS = RANDOM_MAPS + POLYNOMIAL_MAPS + ELEMENTWISE_MAPS
# Those whose dot products estimate exp(q·k).
EXPONENTIAL_MAPS = RANDOM_MAPS + POLYNOMIAL_MAPS
# Those that make two features of each row of the projection.
TWO_SIDED_MAPS = ("hyperbolic", "trigonometric")
# Those that can be calibrated: positive, and causal.
CALIBRATED_RANDOM_MAPS = ("favor+", "hyperbolic")
CALIBRATED_MAPS = CALIBRATED_RANDOM_MAPS + POLYNOMIAL_MAPS
ROW_NORMS = ("chi", "sqrt_dim")


def check_arguments(layer, key_dim):
    """Raises `ValueError` for arguments of the layer that are invalid."""
    name = layer.feature_map
    if not callable(name) and name not in FEATURE_MAPS:
        raise ValueError(
            f"`feature_map` must be one of {', '.join(FEATURE_MAPS)}, or a "
            f"callable. Received: feature_map={name!r}"
        )
    for argument in ("num_features", "redraw_interval", "window"):
        check_positive_int(argument, getattr(layer, argument), optional=True)
    check_positive_int("chunk_size", layer.chunk_size)
    if name in TWO_SIDED_MAPS and (layer.num_features or 0) % 2:
        raise ValueError(
            f"`num_features` must be even for feature_map={name!r}, which makes "
            f"two of each row. Received: num_features={layer.num_features}"
        )
    sized = name in RANDOM_MAPS or name == "relu" or callable(name)
    if layer.num_features is not None and not sized:
        raise ValueError(
            f"feature_map={name!r} has no choice of `num_features`. Received: "
            f"num_features={layer.num_features}"
        )
    if layer.order is not None and name not in POLYNOMIAL_MAPS:
        raise ValueError(
            f"`order` is for the feature maps {', '.join(POLYNOMIAL_MAPS)}. "
            f"Received: order={layer.order!r}, feature_map={name!r}"
        )
    if isinstance(name, keras.Layer):
        raise ValueError(
            "`feature_map` must be a name or a function without weights; put a "
            f"learned map in layers before this one. Received: feature_map={name}"
        )
    drawn = layer.orthogonal is not True or layer.row_norm != "chi"
    projects = name in RANDOM_MAPS or (name == "relu" and layer.num_features)
    if drawn and not projects:
        raise ValueError(
            f"feature_map={name!r} has no projection, and no use for `orthogonal` "
            f"and `row_norm`. Received: orthogonal={layer.orthogonal!r}, "
            f"row_norm={layer.row_norm!r}"
        )
    if layer.row_norm not in ROW_NORMS:
        raise ValueError(
            f"`row_norm` must be one of {', '.join(ROW_NORMS)}. Received: "
            f"row_norm={layer.row_norm!r}"
        )
    if layer.redraw_interval is not None and not projects:
        raise ValueError(
            f"feature_map={name!r} has no projection to redraw. Received: "
            f"redraw_interval={layer.redraw_interval}"
        )
    if layer.window is not None and name not in EXPONENTIAL_MAPS:
        raise ValueError(
            "`window` joins exact weights exp(q·k) with features, which have to "
            f"estimate them: {', '.join(EXPONENTIAL_MAPS)}. Received: "
            f"feature_map={name!r}"
        )
    if layer.calibrated and (name not in CALIBRATED_MAPS or not layer.normalize):
        raise ValueError(
            "`calibrated` is for the feature maps "
            f"{', '.join(CALIBRATED_MAPS)}, and leaves out factors that only "
            f"`normalize=True` cancels. Received: feature_map={name!r}, "
            f"normalize={layer.normalize!r}"
        )
    if layer.rank is not None:
        check_positive_int("rank", layer.rank)
        polynomial = layer.calibrated and name in POLYNOMIAL_MAPS
        if not polynomial or layer.rank > key_dim:
            raise ValueError(
                "`rank` is a number of coordinates, at most `key_dim`, for a "
                "polynomial feature map with `calibrated=True`. Received: "
                f"rank={layer.rank}, key_dim={key_dim}, "
                f"feature_map={name!r}, calibrated={layer.calibrated!r}"
            )
    check_positive_number("temperature", layer.temperature)
    check_rotary_wavelength(layer.rotary_wavelength, key_dim)
