"""Angular locality-sensitive hashing."""

import math

from keras import ops

from keras_efficient_attn.ops.common.numerics import greatest_index


def num_rotation_rows(num_buckets):
    """Number of random directions for these buckets: half of each factor."""
    return sum(num_buckets) // 2


def hash_buckets(x, rotations, num_buckets):
    """The bucket of each vector, in each round: `argmax([xR; −xR])`.

    With several factors, `num_buckets=(b₁, b₂)`, each factor has its own rotations, and
    the bucket is `h₁ + b₁ h₂`: b₁ · b₂ buckets at the cost of b₁ + b₂.

    Args:
        x: `(batch, length, heads, dim)`. Gets no gradient.
        rotations: `(rounds, heads, dim, sum(num_buckets) / 2)`.
        num_buckets: Tuple of even integers.

    Returns:
        Integers `(batch, heads, rounds, length)`, below the product of `num_buckets`.

    Reference:
        - [Andoni et al., 2015](https://arxiv.org/abs/1509.02897)
    """
    x = ops.stop_gradient(x)
    rotated = ops.einsum("bnhd,rhdk->bhrnk", x, ops.cast(rotations, x.dtype))
    bucket, start = None, 0
    for i, size in enumerate(num_buckets):
        part = rotated[..., start : start + size // 2]
        start += size // 2
        digit = greatest_index(ops.concatenate([part, -part], axis=-1))
        digit = digit * math.prod(num_buckets[:i])
        bucket = digit if bucket is None else bucket + digit
    return bucket
