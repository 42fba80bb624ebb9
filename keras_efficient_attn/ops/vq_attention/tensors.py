"""Tensors that travel together through attention over quantised keys."""

from typing import Any, NamedTuple


class Codebook(NamedTuple):
    """The codes of each head.

    Attributes:
        codes: `(heads, codes, dim)`.
        sigma: `(heads,)`, the width of soft codes; `None` for hard ones.
    """

    codes: Any
    sigma: Any = None


class Keys(NamedTuple):
    """Keys, or their codes or residuals, with their values.

    Attributes:
        key: `(batch, length, heads, dim)`: keys, their codes, or their residuals.
        value: `(batch, length, heads, value_dim)`.
        valid: `(batch, length)`, 1 for keys that exist and 0 for others; `None` where
            all do.
        index: int32 `(batch, length, heads)`, the nearest codes; `None` for soft ones.
    """

    key: Any
    value: Any
    valid: Any = None
    index: Any = None


class Positions(NamedTuple):
    """Queries and keys whose products are added to the logits in the window.

    Attributes:
        query: `(batch, length, heads, dim)`.
        key: `(distances, heads, dim)`, of falling distances.
    """

    query: Any
    key: Any


def each(function, tensors):
    """Applies a function to each tensor of a tuple, named or not; `None` stays."""
    results = [None if t is None else function(t) for t in tensors]
    return type(tensors)(*results) if hasattr(tensors, "_fields") else tuple(results)
