"""Triangular systems."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name

# Rows whose matrix is inverted.
BLOCK = 16


def solve_unit_lower(matrix, right):
    """X of `(I + matrix) X = right`.

    Args:
        matrix: `(..., n, n)`, zero on and above the diagonal; `n` is known.
        right: `(..., n, m)`.
    """
    if backend_name() == "jax":
        import jax

        # On a CPU, JAX would call LAPACK, which is slower here, and which a model
        # that was exported to TensorFlow does not find. On a TPU, products would lose
        # digits that inverses need.
        with jax.default_matmul_precision("highest"):
            return _solve_by_blocks(matrix, right)
    identity = ops.eye(matrix.shape[-1], dtype=matrix.dtype)
    return ops.solve_triangular(identity + matrix, right, lower=True)


def _solve_by_blocks(matrix, right):
    """Substitution of blocks, with the inverses of those on the diagonal."""
    size = matrix.shape[-1]
    count = -(-size // BLOCK)
    block = -(-size // count)
    missing = count * block - size
    if missing:
        before = [(0, 0)] * (len(matrix.shape) - 2)
        matrix = ops.pad(matrix, [*before, (0, missing), (0, missing)])
        right = ops.pad(right, [*before, (0, missing), (0, 0)])
    parts = [slice(i * block, (i + 1) * block) for i in range(count)]
    inverses = _inverse(ops.stack([matrix[..., p, p] for p in parts], axis=-3))
    solved = []
    for index, part in enumerate(parts):
        rest = right[..., part, :]
        if solved:
            known = ops.concatenate(solved, axis=-2)
            rest = rest - matrix[..., part, : index * block] @ known
        solved.append(inverses[..., index, :, :] @ rest)
    return ops.concatenate(solved, axis=-2)[..., :size, :]


def _inverse(matrix):
    """Of `I + matrix`, by inverses of blocks on the diagonal that double in size.

    Powers of the matrix, as in a Neumann series, grow to where float32 has no digits
    left if keys repeat; the entries of these inverses do not grow.
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
