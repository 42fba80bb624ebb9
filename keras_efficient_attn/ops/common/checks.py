"""Checks of arguments."""

import math
import numbers

import keras
import numpy as np

from keras_efficient_attn.ops.common.backend import is_traced_by_torch


def _check(argument, received, holds, kind, optional=False):
    if not (holds or optional and received is None):
        raise ValueError(
            f"`{argument}` must be {kind}{' or None' if optional else ''}. Received: "
            f"{argument}={received!r}"
        )


def check_positive_int(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    holds = is_positive_int(received)
    _check(argument, received, holds, "a positive integer", optional)


def check_int(argument, received, least, optional=False):
    """Raises `ValueError` unless it is an integer of at least `least`, or `None`."""
    holds = is_int(received) and received >= least
    _check(argument, received, holds, f"an integer of at least {least}", optional)


def check_any_int(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    _check(argument, received, is_int(received), "an integer", optional)


def check_number(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    _check(argument, received, is_number(received), "a number", optional)


def check_bool(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    _check(argument, received, isinstance(received, bool), "a boolean", optional)


def check_positive_number(argument, received, optional=False):
    """Raises `ValueError` unless `received` is one, or `None` where that is allowed."""
    holds = is_number(received) and 0 < received < math.inf
    _check(argument, received, holds, "a positive number", optional)


def check_weight(argument, received):
    """Raises `ValueError` unless `received` is a finite number of at least 0."""
    holds = is_number(received) and 0 <= received < math.inf
    _check(argument, received, holds, "a finite number of at least 0")


def check_rate(argument, received):
    """Raises `ValueError` unless `received` is a rate of dropout."""
    holds = is_number(received) and 0 <= received < 1
    _check(argument, received, holds, "a number of at least 0 and below 1")


def check_name(argument, received, names):
    """Raises `ValueError` if an argument is not one of these names."""
    holds = isinstance(received, str) and received in names
    _check(argument, received, holds, f"one of {', '.join(names)}")


def check_positive_values(argument, received):
    """Raises `ValueError` unless a number, or each of an array or list, is positive.

    The values of a tensor are not read: a program may be being compiled.
    """
    if is_number(received):
        positive = received > 0
    elif isinstance(received, list | tuple | np.ndarray) and not is_traced_by_torch():
        positive = (np.asarray(received) > 0).all()
    else:
        return
    if not positive:
        raise ValueError(
            f"`{argument}` must be positive. Received: {argument}={received}"
        )


def check_rotary_wavelength(received, key_dim):
    """Raises `ValueError` for an invalid wavelength or `key_dim`."""
    check_positive_number("rotary_wavelength", received, optional=True)
    if received is not None and key_dim % 2:
        raise ValueError(
            f"`rotary_wavelength` needs an even `key_dim`. Received: key_dim={key_dim}"
        )


def is_number(received):
    """Whether it is a number of Python or NumPy, but not a boolean."""
    return isinstance(received, numbers.Real) and not isinstance(received, bool)


def is_int(received):
    """Whether it is an integer of Python or NumPy, but not a boolean."""
    return isinstance(received, numbers.Integral) and not isinstance(received, bool)


def is_positive_int(received):
    return is_int(received) and received > 0


def is_pair(received, least):
    """Whether it is two integers, neither below `least`."""
    return (
        isinstance(received, list | tuple)
        and len(received) == 2
        and all(is_int(n) and n >= least for n in received)
    )


def as_python_numbers(config, *names):
    """Replaces NumPy's numbers in a frozen dataclass, which may overflow, by Python's.

    Lists become tuples.
    """
    for name in names:
        received = getattr(config, name)
        if isinstance(received, np.generic):
            object.__setattr__(config, name, received.item())
        elif isinstance(received, list | tuple):
            several = [x.item() if isinstance(x, np.generic) else x for x in received]
            object.__setattr__(config, name, tuple(several))


def may_agree(first, second):
    """Whether two shapes are equal as far as they are known."""
    first, second = tuple(first), tuple(second)
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )


def check_heads(query, key, value, key_mask=None, names=("query", "key")):
    """Raises `ValueError` unless the shapes of one attention agree.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`.
        value: `(batch, key_length, heads, value_dim)`.
        key_mask: `(batch, key_length)` or `None`.
        names: The operation's names for `query` and `key`.
    """
    query_name, key_name = names
    queries, keys, values = (tuple(t.shape) for t in (query, key, value))
    if any(len(shape) != 4 for shape in (queries, keys, values)):
        raise ValueError(
            f"`{query_name}`, `{key_name}` and `value` must have the shape (batch, "
            f"length, heads, dim). Received: {query_name}.shape={queries}, "
            f"{key_name}.shape={keys}, value.shape={values}"
        )
    if not may_agree(queries[:1] + queries[2:], keys[:1] + keys[2:]):
        raise ValueError(
            f"`{query_name}` and `{key_name}` must agree in batch, heads and dim. "
            f"Received: {query_name}.shape={queries}, {key_name}.shape={keys}"
        )
    if not may_agree(keys[:3], values[:3]):
        raise ValueError(
            f"`{key_name}` and `value` must agree in batch, length and heads. "
            f"Received: {key_name}.shape={keys}, value.shape={values}"
        )
    if key_mask is not None and not may_agree(key_mask.shape, keys[:2]):
        raise ValueError(
            f"`key_mask` must have the shape {keys[:2]} of `{key_name}`. Received: "
            f"key_mask.shape={tuple(key_mask.shape)}"
        )


def check_float_dtype(argument, received):
    """Raises `TypeError` unless the tensor is of a floating-point dtype."""
    if not keras.backend.is_float_dtype(received.dtype):
        raise TypeError(
            f"`{argument}` must be a floating-point tensor. Received: "
            f"{argument}.dtype={keras.backend.standardize_dtype(received.dtype)}"
        )


def check_streaming(query, key, causal, state):
    """Raises `ValueError` for a `state` without causality or equal lengths."""
    if state is None:
        return
    if not causal:
        raise ValueError("`state` needs `causal=True`. Received: causal=False")
    if not may_agree(query.shape[1:2], key.shape[1:2]):
        raise ValueError(
            "With `state`, queries and keys must have the same length. Received: "
            f"shapes {tuple(query.shape)} and {tuple(key.shape)}"
        )


def check_dropout(received):
    """Raises `ValueError` unless it is `None`, or a rate and a seed of dropout."""
    if received is None:
        return
    pair = isinstance(received, list | tuple) and len(received) == 2
    if not pair or not is_number(received[0]) or not 0 <= received[0] < 1:
        raise ValueError(
            "`dropout` must be None or a pair of a rate, at least 0 and below 1, and a "
            f"seed. Received: dropout={received!r}"
        )
    seed = received[1]
    is_list = isinstance(seed, list | tuple)
    shape = (len(seed),) if is_list else getattr(seed, "shape", ())
    if not may_agree(shape, (2,)):
        raise ValueError(
            "The seed of `dropout` must be floats of shape (2,), such as from "
            f"`ops.common.random.dropout_seed`. Received: dropout={received!r}"
        )


def check_implementation(implementation, *fast, limited=(), **refused):
    """Raises `ValueError` for an unknown one, or arguments that it lacks.

    Args:
        implementation: `None`, `"reference"`, or one of `fast`.
        *fast: Names of the implementations that are not the definition.
        limited: Those of them that lack the arguments that the reference lacks.
        **refused: Arguments that the reference does not accept, `None` if not given.
    """
    if implementation not in (None, *fast, "reference"):
        names = ", ".join(map(repr, (None, *fast)))
        raise ValueError(
            f"`implementation` must be {names} or 'reference'. Received: "
            f"implementation={implementation!r}"
        )
    given = [
        f"{name}={received!r}" if isinstance(received, int | float) else name
        for name, received in refused.items()
        if received is not None
    ]
    if implementation in ("reference", *limited) and given:
        names = " or ".join(f"`{name}`" for name in refused)
        raise ValueError(
            f"implementation={implementation!r} does not support {names}. Received: "
            f"{', '.join(given)}"
        )
