"""Checks of arguments."""

import math


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


def is_positive_int(x):
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def is_pair(x, least):
    """Whether `x` is two integers, neither below `least`."""
    return (
        isinstance(x, list | tuple)
        and len(x) == 2
        and all(isinstance(n, int) and n >= least for n in x)
    )


def check_pattern_call(
    query, key, value, key_mask, causal, state, implementation, dropout, seed
):
    """Raises `ValueError` for what does not go together."""
    shapes = {"q": tuple(query.shape), "k": tuple(key.shape), "v": tuple(value.shape)}
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(
            "`query`, `key` and `value` must have the shape (batch, length, heads, "
            f"dim). Received: query.shape={shapes['q']}, key.shape={shapes['k']}, "
            f"value.shape={shapes['v']}"
        )
    if not may_agree(shapes["q"][2:], shapes["k"][2:]):
        raise ValueError(
            "`query` and `key` must agree in heads and dim. Received: "
            f"query.shape={shapes['q']}, key.shape={shapes['k']}"
        )
    if not may_agree(shapes["k"][:3], shapes["v"][:3]):
        raise ValueError(
            "`key` and `value` must agree in batch, length and heads. Received: "
            f"key.shape={shapes['k']}, value.shape={shapes['v']}"
        )
    if key_mask is not None and not may_agree(tuple(key_mask.shape), shapes["k"][:2]):
        raise ValueError(
            f"`key_mask` must have the shape {shapes['k'][:2]} of `key`. Received: "
            f"key_mask.shape={tuple(key_mask.shape)}"
        )
    if implementation not in (None, "blocks", "reference"):
        raise ValueError(
            "`implementation` must be None, 'blocks' or 'reference'. Received: "
            f"implementation={implementation!r}"
        )
    if dropout and seed is None:
        raise ValueError(
            f"`dropout` needs a `dropout_seed`. Received: dropout={dropout}, "
            "dropout_seed=None"
        )
    if implementation == "reference" and (state is not None or dropout):
        raise ValueError(
            "`implementation='reference'` takes no `state` and no `dropout`. "
            f"Received: state={None if state is None else sorted(state)}, "
            f"dropout={dropout}"
        )
    if state is None:
        return
    if not causal:
        raise ValueError(
            "`state` holds the past, and needs `causal=True`. Received: causal=False"
        )
    if not may_agree(shapes["q"][1:2], shapes["k"][1:2]):
        raise ValueError(
            "With `state`, queries and keys must have the same length. Received: "
            f"query.shape={shapes['q']}, key.shape={shapes['k']}"
        )


def may_agree(first, second):
    """Whether two shapes are equal as far as they are known."""
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )
