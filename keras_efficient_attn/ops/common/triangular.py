"""Triangular matrices: sums along sequences, and inverses."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name, shape_of
from keras_efficient_attn.ops.common.numerics import cumulative_sum
from keras_efficient_attn.ops.common.plan import device_kind

# Size of the matrices that are inverted.
BLOCK = 16


def sums_up_to(x):
    """The sums up to and including each position, along the second to last axis."""
    if backend_name() == "jax":
        return _sums(np.tri(x.shape[-2]), x)
    return cumulative_sum(x, len(x.shape) - 2)


def sums_after(x):
    """The sums over the positions after each one, along the second to last axis."""
    if backend_name() == "jax":
        return _sums(np.tri(x.shape[-2], k=-1).T, x)
    later = ops.concatenate([x[..., 1:, :], ops.zeros_like(x[..., :1, :])], axis=-2)
    return ops.flip(sums_up_to(ops.flip(later, axis=-2)), axis=-2)


def _sums(triangle, x):
    """As a product, which is faster on a TPU, in float32 precision."""
    import jax

    with jax.default_matmul_precision("highest"):
        return ops.convert_to_tensor(triangle, x.dtype) @ x


def inverse_unit_lower(matrix):
    """The inverse of `I + matrix`.

    Args:
        matrix: `(..., n, n)`, zero on and above the diagonal; `n` is known.
    """
    if backend_name() == "jax" and device_kind() == "cpu":
        # JAX would call LAPACK, which is slower here and unavailable in a model
        # exported to TensorFlow.
        return _inverse_by_blocks(matrix)
    identity = ops.eye(matrix.shape[-1], dtype=matrix.dtype)
    right = ops.broadcast_to(identity, shape_of(matrix))
    return ops.solve_triangular(identity + matrix, right, lower=True)


def _inverse_by_blocks(matrix):
    """Inverts blocks on the diagonal and merges them pairwise."""
    size = matrix.shape[-1]
    count = 1
    while count * BLOCK < size:
        count *= 2
    block = -(-size // count)
    missing = count * block - size
    if missing:
        before = [(0, 0)] * (len(matrix.shape) - 2)
        matrix = ops.pad(matrix, [*before, (0, missing), (0, missing)])

    def blocks(height, first):
        """Diagonal blocks, or with `first` 1 the blocks left of every second one."""
        rows = range(first * height, count * block, (1 + first) * height)
        columns = (row - first * height for row in rows)
        parts = [
            matrix[..., row : row + height, column : column + height]
            for row, column in zip(rows, columns, strict=True)
        ]
        return ops.stack(parts, axis=-3)

    inverses = _inverse(blocks(block, 0))
    while inverses.shape[-3] > 1:
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        below = -second @ blocks(first.shape[-1], 1) @ first
        above = ops.concatenate([first, ops.zeros_like(below)], axis=-1)
        below = ops.concatenate([below, second], axis=-1)
        inverses = ops.concatenate([above, below], axis=-2)
    return inverses[..., 0, :size, :size]


def _inverse(matrix):
    """Inverts `I + matrix` by inverses of diagonal blocks that double in size.

    Powers of the matrix, as in a Neumann series, grow beyond float32 precision if keys
    repeat; the entries of these inverses do not grow.
    """
    size = matrix.shape[-1]
    row, column = np.ogrid[:size, :size]
    inverse = ops.zeros_like(matrix) + ops.eye(size, dtype=matrix.dtype)
    half = 1
    while half < size:
        # The lower left quarters of blocks of twice the size.
        quarter = (row // half % 2 == 1) & (row // half - 1 == column // half)
        below = ops.where(quarter, matrix, 0.0)
        inverse = inverse - inverse @ below @ inverse
        half *= 2
    return inverse
