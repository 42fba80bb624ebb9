"""Local attention in two dimensions: rectangles of an image and what surrounds them."""

import dataclasses
import functools

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.block_softmax import attend_blocks
from keras_efficient_attn.ops.common.chunking import (
    overlapping_blocks,
    pad_length,
    sizes,
)
from keras_efficient_attn.ops.common.masks import GridBlocks


def grid_rule(grid, block, memory, block_order, causal):
    """The `GridBlocks` over positions of the image itself."""
    rows, columns = grid
    (height, width), (above, beside) = block, memory
    if block_order:
        bands, steps = -(-above // height), -(-beside // width)
        reach = bands * height * columns + (steps + 1) * height * width
    else:
        reach = (height - 1 + above) * columns + width - 1 + beside
    reach = min(reach, rows * columns - 1)
    return GridBlocks(block, memory, block_order, causal, columns, reach)


@functools.cache
def generation_order(grid, block, block_order):
    """Position in the image, row by row, of each step of the order in which it grows.

    Args:
        grid: Rows and columns of the image.
        block: Rows and columns of a rectangle.
        block_order: Whether it grows rectangle by rectangle, row by row in each,
            instead of row by row altogether.

    Returns:
        Integer array `(rows · columns,)`, a permutation.
    """
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    if not block_order:
        return rows * grid[1] + columns
    # The last key counts first.
    return np.lexsort((columns, rows, columns // block[1], rows // block[0]))


def reordered(x, order):
    """`x` with positions taken in that order along axis 1."""
    if np.array_equal(order, np.arange(len(order))):
        return x
    return ops.take(x, ops.convert_to_tensor(order, "int32"), axis=1)


def attend_grid(query, key, value, valid, grid, rule, dropout=None):
    """The part of a softmax over what the rectangles of an image see.

    Args:
        query: `(batch, length, heads, dim)`, scaled; the first steps of the order in
            which the image grows, all of them or fewer.
        key, value: `(batch, length, heads, dim)`, `value` zero where not valid.
        valid: `(batch, length)`.
        grid: Rows and columns of the image.
        rule: From `grid_rule`.
        dropout: `(rate, seed)` or `None`.

    Returns:
        `(values, totals, log_scale)`, each of `(batch, length, heads, ...)`.
    """
    (height, width), (above, beside) = rule.block, rule.memory
    below = 0 if rule.causal else above
    order = generation_order(grid, rule.block, rule.block_order)
    place = np.argsort(order)
    length, size = ops.shape(query)[1], len(order)
    missing = size - length if isinstance(length, int) else size

    def rectangles(x, above, below, beside):
        x = reordered(pad_length(x, 0, missing)[:, :size], place)
        return _rectangles(x, grid, rule.block, above, below, beside)

    def steps(x):
        x = reordered(_image(x, grid, rule.block), order)
        if isinstance(length, int):
            return x[:, :length]
        # JAX exports no slice that might be longer than the tensor.
        return ops.take(x, ops.arange(length, dtype="int32"), axis=1)

    query = rectangles(query, 0, 0, 0)
    key, value, valid = (
        rectangles(t, above, below, beside) for t in (key, value, valid)
    )
    # A rectangle far enough from the edges of a virtual image, and its surroundings.
    top, left = -(-above // height) * height, -(-beside // width) * width
    columns = left + width + beside
    virtual = dataclasses.replace(rule, columns=columns)

    def positions(first_row, last_row, first, last):
        rows = np.arange(first_row, last_row)[:, None]
        return (rows * columns + np.arange(first, last)).ravel()

    part = attend_blocks(
        query,
        key,
        value,
        valid,
        virtual,
        positions(top, top + height, left, left + width),
        positions(top - above, top + height + below, left - beside, columns),
        dropout,
    )
    return tuple(map(steps, part))


def _rectangles(x, grid, block, above, below, beside):
    """`(batch, rows · columns, ...)` as `(batch, rectangles, positions, ...)`."""
    batch, _, *tail = ops.shape(x)
    down, across = (-(-n // size) for n, size in zip(grid, block, strict=True))
    height, width = above + block[0] + below, block[1] + 2 * beside
    x = pad_length(ops.reshape(x, (batch, *grid, *tail)), above, 0)
    x = overlapping_blocks(x, block[0], down, height)
    x = ops.reshape(x, (batch * down * height, grid[1], *tail))
    x = overlapping_blocks(pad_length(x, beside, 0), block[1], across, width)
    x = ops.reshape(x, (batch, down, height, across, width, *tail))
    x = ops.swapaxes(x, 2, 3)
    return ops.reshape(x, (batch, down * across, height * width, *tail))


def _image(x, grid, block):
    """`(batch, rectangles, positions, ...)` back as `(batch, rows · columns, ...)`."""
    batch, _, _, *tail = sizes(x)
    down, across = (-(-n // size) for n, size in zip(grid, block, strict=True))
    x = ops.reshape(x, (batch, down, across, *block, *tail))
    x = ops.swapaxes(x, 2, 3)
    x = ops.reshape(x, (batch, down * block[0], across * block[1], *tail))
    return ops.reshape(x[:, : grid[0], : grid[1]], (batch, grid[0] * grid[1], *tail))
