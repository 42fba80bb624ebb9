"""Sums over the keys of each code: within blocks, and before each block."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import cumulative_sum, sum_rows
from keras_efficient_attn.ops.common.plan import block_sizes

# A code with a smaller count is empty: its mean would be rounding noise.
MIN_COUNT = 1e-20


def one_hot_codes(index, valid, codes):
    """1 for the code of each key that is valid, `(..., length, codes)`."""
    every = ops.arange(codes, dtype="int32")
    chosen = ops.cast(ops.cast(index, "int32") == every, valid.dtype)
    # Without this, XLA would compute the gradient of a mask, a product with all codes.
    return chosen * ops.stop_gradient(valid)


def sum_by_code(rows, index, codes):
    """The sum of each code's rows in each block.

    Args:
        rows: `(batch, heads, blocks, length, dim)`.
        index: `(batch, heads, blocks, length, 1)`.
        codes: Number of codes.

    Returns:
        `(batch, heads, blocks, codes, dim)`.
    """
    if not block_sizes().sum_codes_by_index:
        chosen = one_hot_codes(index, ops.ones(shape_of(index), rows.dtype), codes)
        return ops.swapaxes(chosen, -1, -2) @ rows
    batch, heads, blocks, length, dim = shape_of(rows)
    all_blocks = batch * heads * blocks
    flat = ops.reshape(rows, (all_blocks * length, dim))
    places = ops.reshape(_row_index(index, codes), (-1,))
    sums = sum_rows(flat, places, all_blocks * codes)
    return ops.reshape(sums, (batch, heads, blocks, codes, dim))


def sums_and_counts(value, valid, index, codes):
    """The sum of each code's values in each block, and the number of its keys.

    Args:
        value: `(batch, heads, blocks, length, value_dim)`, zero for missing keys.
        valid: `(batch, 1, blocks, length, 1)`, 1 for keys that exist.
        index: `(batch, heads, blocks, length, 1)`.
        codes: Number of codes.
    """
    exists = ops.ones(shape_of(index), value.dtype) * valid
    counts = sum_by_code(exists, index, codes)[..., 0]
    return sum_by_code(value, index, codes), counts


def rows_of_codes(table, index):
    """The row of each key's code: the transpose of `sum_by_code`.

    Args:
        table: `(batch, heads, blocks, codes, dim)`.
        index: `(batch, heads, blocks, length, 1)`.
    """
    codes = table.shape[-2]
    if not block_sizes().sum_codes_by_index:
        ones = ops.ones(shape_of(index), table.dtype)
        return one_hot_codes(index, ones, codes) @ table
    batch, heads, blocks, _, dim = shape_of(table)
    flat = ops.reshape(table, (batch * heads * blocks * codes, dim))
    return ops.take(flat, _row_index(index, codes), axis=0)


def _row_index(index, codes):
    """Indices into the codes of all blocks, one block after the other."""
    batch, heads, blocks, length, _ = shape_of(index)
    every = ops.arange(batch * heads * blocks, dtype="int32")
    first = codes * ops.reshape(every, (batch, heads, blocks, 1))
    return ops.cast(index[..., 0], "int32") + first


def prefix_sums(first, local):
    """Sums before each block, and after the last."""
    blocks = shape_of(local)[2]
    if isinstance(blocks, int) and blocks == 1:
        return first[:, :, None], first + local[:, :, 0]
    sums = ops.concatenate([first[:, :, None], local], axis=2)
    sums = cumulative_sum(sums, axis=2)
    return sums[:, :, :-1], sums[:, :, -1]


def prefix_sums_gradient(grad_before, grad_last):
    """The gradients of `first` and of `local`."""
    blocks = shape_of(grad_before)[2]
    if isinstance(blocks, int) and blocks == 1:
        return grad_before[:, :, 0] + grad_last, grad_last[:, :, None]
    sums = ops.concatenate([grad_before, grad_last[:, :, None]], axis=2)
    sums = ops.flip(cumulative_sum(ops.flip(sums, axis=2), axis=2), axis=2)
    return sums[:, :, 0], sums[:, :, 1:]
