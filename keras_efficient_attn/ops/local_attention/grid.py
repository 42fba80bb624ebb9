"""Local attention in two dimensions: rectangles of an image with a halo."""

import dataclasses

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_blocks
from keras_efficient_attn.ops.common.chunking import (
    overlapping_blocks,
    pad_length,
    sizes,
)
from keras_efficient_attn.ops.common.constants import constant


@dataclasses.dataclass(frozen=True)
class GridBlocks:
    """The query's own rectangle, and a halo above, left and right of it.

    Positions are in a grid of `columns` columns, row by row. If not causal, the whole
    rectangle, with a halo also below it.

    Attributes:
        block: Rows and columns of a rectangle.
        memory: Rows above, and columns left and right.
        block_order: Whether the order is rectangle by rectangle instead of row by row.
        causal: Whether a query sees only earlier positions in that order.
        columns: Columns of the grid.
    """

    block: tuple
    memory: tuple
    block_order: bool
    causal: bool
    columns: int

    def __call__(self, i, j):
        height, width = self.block
        above, beside = self.memory
        row, column = i // self.columns, i % self.columns
        key_row, key_column = j // self.columns, j % self.columns
        top, left = row - row % height, column - column % width
        below = 0 if self.causal else above
        seen = (key_row >= top - above) & (key_row < top + height + below)
        seen = seen & (key_column >= left - beside)
        seen = seen & (key_column < left + width + beside)
        if not self.causal:
            return seen
        raster = j <= i
        if not self.block_order:
            return seen & raster
        # Earlier rectangles are above and on the left; later ones on the right.
        own = (key_row >= top) & (key_column >= left)
        earlier = (key_row < top) | (key_column < left)
        return seen & (earlier | (own & raster & (key_column < left + width)))


@dataclasses.dataclass(frozen=True)
class GridSteps:
    """`GridBlocks` over the steps of an image's order.

    Attributes:
        grid: Rows and columns of the image.
        block, memory, block_order, causal: As for `GridBlocks`.
    """

    grid: tuple
    block: tuple
    memory: tuple
    block_order: bool
    causal: bool

    sees_all_in_reach = False

    @property
    def reach(self):
        """The reach of a query, in steps."""
        rows, columns = self.grid
        (height, width), (above, beside) = self.block, self.memory
        if self.block_order:
            bands, steps = -(-above // height), -(-beside // width)
            reach = bands * height * columns + (steps + 1) * height * width
        else:
            reach = (height - 1 + above) * columns + width - 1 + beside
        return min(reach, rows * columns - 1)

    @property
    def order(self):
        """The `GridOrder` of the steps."""
        return GridOrder(self.grid, self.block, self.block_order)

    def in_columns(self, columns):
        """The mask function over positions of an image of that many columns."""
        return GridBlocks(
            self.block, self.memory, self.block_order, self.causal, columns
        )

    def __call__(self, i, j):
        return self.in_columns(self.grid[1])(self._position(i), self._position(j))

    def _position(self, steps):
        last = self.grid[0] * self.grid[1] - 1
        if isinstance(steps, np.ndarray):
            order = _positions(self.grid, self.block, self.block_order)
            return order[np.clip(steps, 0, last)]
        # Steps before the first and after the last have no keys and no queries.
        return ops.take(self.order.positions(), ops.clip(steps, 0, last), axis=0)


@dataclasses.dataclass(frozen=True)
class GridOrder:
    """The order of an image's positions, as steps.

    Attributes:
        grid: Rows and columns of the image.
        block: Rows and columns of a rectangle.
        by_block: Whether the order is rectangle by rectangle, row by row within each,
            instead of row by row.
    """

    grid: tuple
    block: tuple
    by_block: bool

    def to_steps(self, x):
        """Reorders positions of an image along axis 1 from rows to steps."""
        return x if self._is_by_row else ops.take(x, self.positions(), axis=1)

    def to_rows(self, x):
        """Reorders positions of an image along axis 1 from steps to rows."""
        return x if self._is_by_row else ops.take(x, self._table(_steps), axis=1)

    def positions(self):
        """Position in the image, row by row, of each step, as a tensor."""
        return self._table(_positions)

    @property
    def _is_by_row(self):
        """Whether both orders are equal: a rectangle has one row, or whole rows."""
        height, width = map(min, self.block, self.grid)
        return not self.by_block or height == 1 or width == self.grid[1]

    def _table(self, function):
        return constant(function, self.grid, self.block, self.by_block, dtype="int32")


def _positions(grid, block, by_block):
    """`GridOrder.positions` as an integer array."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    if not by_block:
        return rows * grid[1] + columns
    # The last key counts first.
    return np.lexsort((columns, rows, columns // block[1], rows // block[0]))


def _steps(grid, block, by_block):
    """The step of each position."""
    return np.argsort(_positions(grid, block, by_block))


def attend_grid(query, key, value, valid, mask_fn, dropout=None):
    """Partial softmax over the keys that an image's rectangles see.

    Args:
        query: `(batch, length, heads, dim)`, scaled; the first steps of the image's
            order, all or fewer.
        key, value: `(batch, length, heads, dim)`, `value` zero where not valid.
        valid: `(batch, length)`.
        mask_fn: `GridSteps`.
        dropout: `(rate, seed)` or `None`.

    Returns:
        `(values, totals, log_scale)`, each of `(batch, length, heads, ...)`.
    """
    grid, block, order = mask_fn.grid, mask_fn.block, mask_fn.order
    (height, width), (above, beside) = block, mask_fn.memory
    below = 0 if mask_fn.causal else above
    length, size = shape_of(query)[1], grid[0] * grid[1]
    missing = size - length if isinstance(length, int) else size

    def rectangles(x, above, below, beside):
        x = order.to_rows(pad_length(x, 0, missing)[:, :size])
        return _rectangles(x, grid, block, above, below, beside)

    def steps(x):
        x = order.to_steps(_image(x, grid, block))
        if isinstance(length, int):
            return x[:, :length]
        # JAX cannot export a slice that may be longer than the tensor.
        return ops.take(x, ops.arange(length, dtype="int32"), axis=1)

    query = rectangles(query, 0, 0, 0)
    key, value, valid = (
        rectangles(t, above, below, beside) for t in (key, value, valid)
    )
    # A rectangle with its halo, far from the edges of a virtual image.
    top, left = -(-above // height) * height, -(-beside // width) * width
    columns = left + width + beside

    def positions(first_row, last_row, first, last):
        rows = ops.arange(first_row, last_row, dtype="int32")[:, None] * columns
        return ops.reshape(rows + ops.arange(first, last, dtype="int32"), (-1,))

    part = attend_blocks(
        query,
        key,
        value,
        valid,
        mask_fn.in_columns(columns),
        (
            positions(top, top + height, left, left + width),
            positions(top - above, top + height + below, left - beside, columns),
        ),
        dropout,
    )
    return tuple(map(steps, part))


def _rectangles(x, grid, block, above, below, beside):
    """`(batch, rows · columns, ...)` as `(batch, rectangles, positions, ...)`."""
    batch, _, *tail = shape_of(x)
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
