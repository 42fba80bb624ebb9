"""The logarithm of the Fourier kernel for tiles of queries and keys.

```
L[t, s] = Σ_d log|sin(z_d) / z_d|,   z = a[t] − b[s]
```

Factors of `SLOTS` dimensions are multiplied before the one logarithm. Arrays of queries
and keys have the shape `(SLOTS, batch, heads, dims / SLOTS, length)`, from
`split_dims`.
"""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import pad

POWERS = (2, 4, 6, 8)
# A product of this many sin(z)/z stays in the range of float32 up to z of 1e9.
SLOTS = 4


class Kernel(NamedTuple):
    """The kernel on one backend.

    Attributes:
        prepare: The arrays that the kernel reads of queries or keys, a tuple, from
            their angles: queries or keys times their radius.
        log_kernel: `L`, `(batch, heads, queries, keys)`, from the arrays of queries and
            of keys; `LOG_ZERO` or less where the kernel is 0.
        log_kernel_gradient: Gradients of the angles of queries and keys, from both
            arrays and the gradient of `L`. `None` where the automatic one is as good.

            The derivative of `log|sin(z)/z|` is `cot z − 1/z`. Where the sine rounds to
            about zero, the sign and size of the cotangent are rounding errors: it
            multiplies a weight with an even power of the sine, and that product is 0 in
            the limit.
    """

    prepare: Callable
    log_kernel: Callable
    log_kernel_gradient: Callable | None


def check_power(power):
    """Raises `ValueError` for an unsupported power."""
    if isinstance(power, float) or power not in POWERS:
        raise ValueError(f"`power` must be one of {POWERS}. Received: power={power!r}")


def split_dims(x):
    """`(batch, length, heads, dim)` as `(SLOTS, batch, heads, dims / SLOTS, length)`.

    The last dimensions are padded with zeros, with the factor sin(0)/0 = 1.
    """
    batch, length, heads, dim = shape_of(x)
    if dim % SLOTS:
        x = pad(x, [(0, 0)] * 3 + [(0, -dim % SLOTS)])
    x = ops.reshape(x, (batch, length, heads, SLOTS, -(-dim // SLOTS)))
    return ops.transpose(x, (3, 0, 2, 4, 1))


def join_dims(x, dim):
    """The inverse of `split_dims`."""
    slots, batch, heads, groups, length = shape_of(x)
    x = ops.transpose(x, (1, 4, 2, 0, 3))
    return ops.reshape(x, (batch, length, heads, slots * groups))[..., :dim]
