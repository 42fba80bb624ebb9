"""Attention to keys through their codes, in linear time.

A cache holds, per code, the number of its keys and the sum of their values. Query `t`
weights code `c` by `exp(q·c + log count)` and reads the mean of its values. Keys of the
current block, which the cache does not hold yet, are weighted one by one.

For hard codes, with the sums S and counts n per code before a block, queries Q and
codes C,

```
W      = exp(Q Cᵀ + log n − scale)            weights of the codes
A      = tril(exp(Q Kᵀ − scale))              weights of the keys of the block
values = W (S / n) + A V
totals = W 1 + A 1
```

The keys K of a block are codes, too, read by the index of each. Codes, their choice and
the counts have no gradient.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import pick, shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    columns,
    lower_triangle,
)
from keras_efficient_attn.ops.common.numerics import (
    cumulative_sum,
    larger,
    max_along,
    sum_rows,
    where,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.vq_attention.codebook import look_up, responsibilities
from keras_efficient_attn.ops.vq_attention.config import num_features


def layout(sequence, value, codes, config, sequential):
    """The layout of a sequence: `(positions per block, blocks per group, groups)`.

    Args:
        sequence, value: `(batch, length, heads, ...)`.
        codes: `(heads, codes, dim)`.
        config: `VQConfig`.
        sequential: Whether each group is a single block.
    """
    heads, num_codes, dim = codes.shape
    value_dim = value.shape[-1] or dim
    # With `order=2` a key has features, each multiplied with its value.
    features = num_features(config.expanded_dims(dim)) if config.order == 2 else 0
    floats = heads * (3 * num_codes + 2 * dim + 2 * (1 + features) * value_dim)
    length = shape_of(sequence)[1]
    size, blocks, groups = chunk_layout(
        length, config.block_size(num_codes), sequence.shape[0], floats
    )
    # Symbolic lengths, as JAX exports them, make one group.
    known = isinstance(length, int) or pick(True, jax=False)
    if sequential and known:
        return size, 1, blocks * groups
    return size, blocks, groups


def key_columns(keys):
    """The tensors that `Keys` have, for a scan: `(batch, length, heads, ...)`."""
    index = keys.index
    if index is not None:
        index = columns(ops.cast(index, keys.value.dtype))
    tensors = keys.key, keys.value, columns(keys.valid), index
    return tuple(t for t in tensors if t is not None)


@functools.cache
def soft_step(block_length):
    def step(carry, x, consts):
        codebook, *mixture = consts
        query, key, value, valid = (by_head(t, block_length) for t in x)
        chosen = responsibilities(key, codebook, *mixture) * valid
        before, sums = prefix_sums(carry[0], ops.swapaxes(chosen, -1, -2) @ value)
        counts_before, counts = prefix_sums(carry[1], ops.sum(chosen, axis=-2))
        logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
        part = read_mixture(logits, chosen, value, before, counts_before)
        return (sums, counts), tuple(by_position(t) for t in part)

    return step


def key_step(carry, x, consts):
    codebook, *mixture = consts
    tensors = [by_head(t, shape_of(x[0])[1]) for t in x]
    if mixture:
        key, value, valid = tensors
        chosen = responsibilities(key, codebook, *mixture) * valid
        new = ops.swapaxes(chosen, -1, -2) @ value, ops.sum(chosen, axis=-2)
    else:
        new = sums_and_counts(*tensors, codebook.shape[1])
    return tuple(old + t[:, :, 0] for old, t in zip(carry, new, strict=True)), ()


def query_step(carry, x, consts):
    codebook, sums, counts = consts
    query = by_head(x[0], shape_of(x[0])[1])
    logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
    weights, total, scale = weigh(logits, counts[:, :, None, None])
    part = weights @ sums[:, :, None], total, scale
    return carry, tuple(by_position(t) for t in part)


def weigh(logits, numbers):
    """The softmax over codes, each with its number of keys, which may be 0.

    Args:
        logits: `(..., codes)`.
        numbers: Broadcasts with the logits.

    Returns:
        `(weights, total, log_scale)`, with the weights of one key per code.
    """
    full = numbers > MIN_COUNT
    with_numbers = logits + ops.log(ops.where(full, numbers, 1.0))
    with_numbers = ops.stop_gradient(where(full, with_numbers, LOG_ZERO))
    scale = max_along(with_numbers, axis=-1)
    # At most 1 / number.
    weights = ops.exp(where(full, logits - scale[..., None], LOG_ZERO))
    return weights, ops.sum(weights * numbers, axis=-1), scale


def read_mixture(logits, chosen, values, sums=None, counts=None, seen=None):
    """Partial softmax over soft codes: each key of the block has a share in every code.

    Its weight is `Σ_c exp(q·c) p(c | key)`. A code without keys so far must not set the
    scale, so the counts are those up to the query.

    Args:
        logits: `(batch, heads, blocks, length, codes)`.
        chosen: `(batch, heads, blocks, length, codes)`, the shares of each key.
        values: `(batch, heads, blocks, length, value_dim)`.
        sums, counts: The cache before each block, or `None` for an empty one.
        seen: 1 for keys of the block that a query sees and 0 for others. Defaults to
            those up to its own.
    """
    if seen is None:
        seen = ops.cast(lower_triangle(shape_of(logits)[3]), logits.dtype)
    in_block = seen @ chosen
    counts = in_block if counts is None else counts[..., None, :] + in_block
    weights, total, scale = weigh(logits, counts)
    key_weights = (weights @ ops.swapaxes(chosen, -1, -2)) * seen
    output = key_weights @ values
    return output if sums is None else weights @ sums + output, total, scale


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
    sums = cumulative_sum(sums, 2)
    return sums[:, :, :-1], sums[:, :, -1]


def prefix_sums_gradient(grad_before, grad_last):
    """The gradients of `first` and of `local`."""
    blocks = shape_of(grad_before)[2]
    if isinstance(blocks, int) and blocks == 1:
        return grad_before[:, :, 0] + grad_last, grad_last[:, :, None]
    sums = ops.concatenate([grad_before, grad_last[:, :, None]], axis=2)
    sums = ops.flip(cumulative_sum(ops.flip(sums, axis=2), 2), axis=2)
    return sums[:, :, 0], sums[:, :, 1:]


@functools.cache
def hard_step(block_length):
    """`(step, gradient)` for `recompute_scan`.

    The carry is `(sum, count)`; `x` is the query, the values of the keys, 1 for keys
    that exist, and the indices of their codes, by position.
    """

    def step(carry, x, consts):
        blocks = _Blocks(carry, x, *consts, block_length)
        return blocks.carry, tuple(by_position(t) for t in blocks.part())

    def gradient(carry, x, consts, y, carry_gradient, y_gradient):
        blocks = _Blocks(carry, x, *consts, block_length)
        scale = by_head(columns(y[2]), block_length)[..., 0]
        grad_values = by_head(y_gradient[0], block_length)
        grad_totals = by_head(columns(y_gradient[1]), block_length)
        grad_sums, grad_query, grad_value = blocks.gradient(
            scale, grad_values, grad_totals, carry_gradient[0]
        )
        grad_x = (
            by_position(grad_query),
            by_position(grad_value),
            *map(ops.zeros_like, x[2:]),
        )
        grad_carry = grad_sums, ops.zeros_like(carry[1])
        return grad_carry, grad_x, (ops.zeros_like(consts[0]),)

    return step, gradient


class _Blocks:
    """A group of blocks: logits, and what queries read before each block.

    Attributes:
        logits: Of the codes, with the log counts, `(batch, heads, blocks, length,
            codes)`.
        key_logits: Of the keys of the same block, `(batch, heads, blocks, length,
            length)`.
        means: The mean values of the codes before each block.
        inverse: The inverse counts, 0 for codes without keys.
        carry: The sums and counts after the last block.
    """

    def __init__(self, carry, x, codes, block_length):
        self.query, self.value, valid, self.index = (
            by_head(t, block_length) for t in x
        )
        index = ops.cast(x[3][..., 0], "int32")
        self.codes, self.key = codes, by_head(look_up(codes, index), block_length)
        local = sums_and_counts(self.value, valid, self.index, codes.shape[1])
        before, sums = prefix_sums(carry[0], local[0])
        counts, after = prefix_sums(carry[1], local[1])
        self.carry = sums, after
        full = counts > MIN_COUNT
        self.inverse = ops.where(full, 1.0 / ops.where(full, counts, 1.0), 0.0)
        self.means = before * self.inverse[..., None]
        log_counts = where(full, ops.log(ops.where(full, counts, 1.0)), LOG_ZERO)
        self.logits = self.query @ ops.swapaxes(codes[:, None], -1, -2)
        self.logits = self.logits + log_counts[..., None, :]
        seen = ops.logical_and(lower_triangle(block_length), valid[..., None, :, 0] > 0)
        products = self.query @ ops.swapaxes(self.key, -1, -2)
        self.key_logits = where(seen, products, LOG_ZERO)

    def _weights(self, scale):
        # Without any visible key the scale is `LOG_ZERO`, too.
        scale = ops.where(scale > 0.5 * LOG_ZERO, scale, 0.0)[..., None]
        return ops.exp(self.logits - scale), ops.exp(self.key_logits - scale)

    def part(self):
        """Values, totals and log scales, by head."""
        logits, key_logits = map(ops.stop_gradient, (self.logits, self.key_logits))
        scale = larger(max_along(logits, axis=-1), max_along(key_logits, axis=-1))
        weights, key_weights = self._weights(scale)
        totals = ops.sum(weights, axis=-1) + ops.sum(key_weights, axis=-1)
        return weights @ self.means + key_weights @ self.value, totals, scale

    def gradient(self, scale, grad_values, grad_totals, grad_sums):
        """Gradients of the sums before the first block, the queries and the values.

        Args:
            scale: `(batch, heads, blocks, length)`.
            grad_values: `(batch, heads, blocks, length, value_dim)`.
            grad_totals: `(batch, heads, blocks, length, 1)`.
            grad_sums: Gradients of the sums after the last block.
        """
        weights, key_weights = self._weights(scale)
        grad_logits = weights * (
            grad_values @ ops.swapaxes(self.means, -1, -2) + grad_totals
        )
        grad_key_logits = key_weights * (
            grad_values @ ops.swapaxes(self.value, -1, -2) + grad_totals
        )
        grad_query = grad_logits @ self.codes[:, None] + grad_key_logits @ self.key
        grad_means = ops.swapaxes(weights, -1, -2) @ grad_values
        grad_sums, grad_local = prefix_sums_gradient(
            grad_means * self.inverse[..., None], grad_sums
        )
        grad_value = ops.swapaxes(key_weights, -1, -2) @ grad_values
        grad_value = grad_value + rows_of_codes(grad_local, self.index)
        return grad_sums, grad_query, grad_value
