"""Checks of arguments that several layers share."""

import math

from keras_efficient_attn.ops.pattern_inputs import is_positive_int


def check_positive_int(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    if optional and received is None:
        return
    if not is_positive_int(received):
        raise ValueError(
            f"`{argument}` must be a positive integer"
            f"{' or None' if optional else ''}. Received: {argument}={received!r}"
        )


def check_positive_number(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    if optional and received is None:
        return
    if not is_number(received) or not 0 < received < math.inf:
        raise ValueError(
            f"`{argument}` must be a positive number"
            f"{' or None' if optional else ''}. Received: {argument}={received!r}"
        )


def check_rotary_wavelength(received, key_dim):
    """Raises `ValueError` for a wavelength or a `key_dim` that cannot be."""
    check_positive_number("rotary_wavelength", received, optional=True)
    if received is not None and key_dim % 2:
        raise ValueError(
            f"`rotary_wavelength` needs an even `key_dim`. Received: key_dim={key_dim}"
        )


def is_number(received):
    """Whether it is an int or a float, and not a boolean."""
    return isinstance(received, int | float) and not isinstance(received, bool)
