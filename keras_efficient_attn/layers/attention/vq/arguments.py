"""The arguments of `VQAttention`: what there is, and what goes together."""

import math

from keras_efficient_attn.layers.attention.vq.codebooks import CODEBOOK_INITS
from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_positive_number,
    check_rotary_wavelength,
    is_number,
)
from keras_efficient_attn.ops.vq_attention.api import check_order

ASSIGNMENTS = ("hard", "soft")
# What one assignment has no use for, with the values that say nothing.
HARD_ONLY = {
    "order": 0,
    "rank": None,
    "quantize_window": False,
    "decay": 0.99,
    "commitment_weight": 1e-4,
    "revive_after": 100,
}
SOFT_ONLY = {"sigma": 1.0, "learn_sigma": False}


def check_arguments(layer, key_dim):
    """Raises `ValueError` for arguments of the layer that are invalid."""
    check_positive_int("num_codes", layer.num_codes)
    for argument in ("window", "block_length", "revive_after"):
        check_positive_int(argument, getattr(layer, argument), optional=True)
    if layer.assignment not in ASSIGNMENTS:
        raise ValueError(
            f"`assignment` must be one of {', '.join(ASSIGNMENTS)}. Received: "
            f"assignment={layer.assignment!r}"
        )
    unused = HARD_ONLY if layer.assignment == "soft" else SOFT_ONLY
    for argument, default in unused.items():
        if getattr(layer, argument) != default:
            raise ValueError(
                f"assignment={layer.assignment!r} has no use for `{argument}`. "
                f"Received: {argument}={getattr(layer, argument)!r}"
            )
    if layer.codebook_init not in (None, *CODEBOOK_INITS):
        raise ValueError(
            f"`codebook_init` must be None or one of {', '.join(CODEBOOK_INITS)}. "
            f"Received: codebook_init={layer.codebook_init!r}"
        )
    if layer.assignment == "soft" and layer.codebook_init == "first_batch":
        raise ValueError(
            "Soft codes are trained weights: start them at random, or from data "
            "by `calibrate`. Received: codebook_init='first_batch'"
        )
    for argument in ("quantize_window", "relative_positions"):
        if getattr(layer, argument) and layer.window is None:
            raise ValueError(
                f"`{argument}` needs a `window`. Received: {argument}=True, window=None"
            )
    if not layer.cache and not layer.quantize_window:
        raise ValueError(
            "`cache=False` leaves codes in use only with `quantize_window=True`. "
            "Received: cache=False, quantize_window=False"
        )
    check_order(layer.order, layer.rank, key_dim)
    if layer.order == 2 and layer.quantize_window:
        raise ValueError(
            "`order=2` expands keys around their codes, and excludes "
            "`quantize_window`, which drops what is left of them. Received both."
        )
    check_positive_number("sigma", layer.sigma)
    if not is_number(layer.decay) or not 0 < layer.decay < 1:
        raise ValueError(
            f"`decay` must be a number between 0 and 1. Received: decay={layer.decay!r}"
        )
    weight = layer.commitment_weight
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise ValueError(
            "`commitment_weight` must be a number of at least 0. Received: "
            f"commitment_weight={weight!r}"
        )
    check_rotary_wavelength(layer.rotary_wavelength, key_dim)
