"""One step of causal attention to hard codes, over a group of blocks, and its gradient.

With the sums S and counts n per code before a block, queries Q and codes C,

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

from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    columns,
    lower_triangle,
)
from keras_efficient_attn.ops.common.numerics import larger, max_along
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.vq_attention.code_sums import (
    MIN_COUNT,
    prefix_sums,
    prefix_sums_gradient,
    rows_of_codes,
    sums_and_counts,
)
from keras_efficient_attn.ops.vq_attention.codebook import look_up


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
        log_counts = ops.where(full, ops.log(ops.where(full, counts, 1.0)), LOG_ZERO)
        self.logits = self.query @ ops.swapaxes(codes[:, None], -1, -2)
        self.logits = self.logits + log_counts[..., None, :]
        seen = ops.logical_and(lower_triangle(block_length), valid[..., None, :, 0] > 0)
        products = self.query @ ops.swapaxes(self.key, -1, -2)
        self.key_logits = ops.where(seen, products, LOG_ZERO)

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
