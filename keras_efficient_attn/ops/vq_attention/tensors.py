"""Groups of tensors for attention over quantised keys."""

from typing import Any, NamedTuple

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_values


class Codebook(NamedTuple):
    """The codes of each head.

    Attributes:
        codes: `(heads, codes, dim)`.
        sigma: `(heads, codes)`, the widths of soft codes; `None` for hard codes.
        log_weights: Optional `(heads, codes)`, the mixture weights of soft codes.
    """

    codes: Any
    sigma: Any = None
    log_weights: Any = None


class Keys(NamedTuple):
    """Keys or their residuals, with their values.

    Attributes:
        key: `(batch, length, heads, dim)`: keys or their residuals; `None` where the
            `index` is enough.
        value: `(batch, length, heads, value_dim)`.
        valid: `(batch, length)`, 1 for keys that exist and 0 for others; `None` if all
            exist.
        index: int32 `(batch, length, heads)`, the nearest codes; `None` for soft codes.
    """

    key: Any
    value: Any
    valid: Any = None
    index: Any = None


class Positions(NamedTuple):
    """Queries and keys whose products are added to the logits in the window.

    Attributes:
        query: `(batch, length, heads, dim)`.
        key: `(distances, heads, dim)`, of decreasing distances.
    """

    query: Any
    key: Any


def each(function, tensors):
    """Applies a function to each tensor of a tuple, named or not; keeps `None`."""
    results = [None if t is None else function(t) for t in tensors]
    return type(tensors)(*results) if hasattr(tensors, "_fields") else tuple(results)


def with_valid(keys):
    """`Keys` that have `valid`."""
    if keys.valid is not None:
        return keys
    return keys._replace(valid=ops.ones(shape_of(keys.key)[:2], keys.key.dtype))


def make_codebook(codes, sigma=None, log_weights=None):
    """`Codebook`, with a width for each code.

    Raises:
        ValueError: If shapes do not agree, a width is not positive, or there are
            weights without widths.
    """
    if sigma is None:
        if log_weights is not None:
            raise ValueError(
                "`log_weights` are those of soft codes, and need a `sigma`. Received: "
                "sigma=None"
            )
        return Codebook(codes)
    expected = tuple(codes.shape[:2])
    check_positive_values("sigma", sigma)
    sigma = ops.convert_to_tensor(sigma)
    if log_weights is not None:
        log_weights = ops.convert_to_tensor(log_weights)
    if tuple(sigma.shape) == expected[:1]:
        sigma = ops.broadcast_to(sigma[:, None], expected)
    for name, tensor in (("sigma", sigma), ("log_weights", log_weights)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"`{name}` must have the shape (heads, codes) = {expected}. Received: "
                f"{name}.shape={tuple(tensor.shape)}"
            )
    return Codebook(codes, sigma, log_weights)
