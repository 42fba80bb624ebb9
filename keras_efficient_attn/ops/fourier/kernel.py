"""The logarithm of the Fourier kernel for tiles of queries and keys.

```
L[t, s] = Σ_d log|sin(z_d) / z_d|,   z = a[t] − b[s]
```

Factors of `SLOTS` dimensions are multiplied before the one logarithm. Arrays of queries
and keys have the shape `(SLOTS, batch, heads, dims / SLOTS, length)`, from
`split_dims`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_positive_int,
)
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.plan import block_sizes

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


IMPLEMENTATIONS = (None, "tiled", "fused", "reference")


@dataclasses.dataclass(frozen=True)
class FourierConfig:
    """The kernel, the causality and the implementation.

    Attributes:
        power: 2, 4, 6 or 8.
        causal: Whether a query sees no later keys.
        chunk_size: Minimum number of queries per tile; `None` for the default.
        implementation: One of `IMPLEMENTATIONS`.

    Raises:
        ValueError: For invalid options.
    """

    power: int = 4
    causal: bool = False
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        as_python_numbers(self, "power", "chunk_size")
        check_power(self.power)
        check_positive_int("chunk_size", self.chunk_size, optional=True)
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"`implementation` must be one of {IMPLEMENTATIONS}. Received: "
                f"implementation={self.implementation!r}"
            )

    @property
    def is_fused(self):
        """Whether PyTorch compiles the kernel."""
        return self.implementation == "fused"

    @property
    def tile_size(self):
        """Minimum number of queries per tile."""
        return self.chunk_size or block_sizes().fourier_tile
