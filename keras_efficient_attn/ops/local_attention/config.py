"""The patterns of local attention."""

import dataclasses

import numpy as np

from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_positive_int,
    is_int,
    is_pair,
    is_positive_int,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.masks import QueryBlocks, SlidingWindow
from keras_efficient_attn.ops.local_attention.grid import GridSteps

WINDOW = 128
ORDERS = ("raster", "block")


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """A local pattern; checks its values and fills in defaults.

    Args:
        window: Positive integer. Defaults to 128 without `query_block`.
        query_block: Positive integer, or a pair of them.
        memory: Non-negative integer, or a pair. Defaults to `query_block`.
        grid: Rows and columns of the image, for a pair `query_block`.
        grid_order: `"raster"` (the default) or `"block"`, for a `grid`.

    Raises:
        ValueError: If the arguments do not define a pattern.
    """

    window: int | None = None
    query_block: int | tuple | None = None
    memory: int | tuple | None = None
    grid: tuple | None = None
    grid_order: str = "raster"

    def __post_init__(self):
        as_python_numbers(self, "window", "query_block", "memory", "grid")
        if self.query_block is None:
            self._check_window()
        elif self.window is not None:
            raise ValueError(
                "`window` cannot be used together with `query_block`. Received: "
                f"window={self.window!r}, query_block={self.query_block!r}"
            )
        else:
            if self.memory is None:
                self._set(memory=self.query_block)
            if self.is_grid:
                self._check_grid()
            else:
                self._check_blocks()
        if self.grid_order not in ORDERS or (
            self.grid_order != "raster" and not self.is_grid
        ):
            raise ValueError(
                f"`grid_order` must be one of {', '.join(ORDERS)}; 'block' needs a "
                "`query_block` of two sizes. Received: "
                f"grid_order={self.grid_order!r}, query_block={self.query_block!r}"
            )

    @property
    def is_grid(self):
        """Whether positions belong to an image."""
        return self.query_block is not None and not isinstance(self.query_block, int)

    def mask_fn(self, causal):
        """The mask function over positions of the sequence."""
        if self.window is not None:
            return SlidingWindow(self.window, causal)
        if self.is_grid:
            return GridSteps(
                self.grid,
                self.query_block,
                self.memory,
                self.grid_order == "block",
                causal,
            )
        return QueryBlocks(self.query_block, self.memory, causal)

    def kernel_obstacle(self, name, causal):
        """The reason why a kernel cannot compute the pattern, or `None`."""
        return "does not support `grid`. Received: grid" if self.is_grid else None

    def check_length(self, argument, length, received):
        """Raises `ValueError` for more positions than the grid has."""
        if self.grid is None or not isinstance(length, int):
            return
        if length > self.grid[0] * self.grid[1]:
            raise ValueError(
                f"`grid` {self.grid} must have a place for each position. Received: "
                f"{argument}={received}"
            )

    def _check_window(self):
        for name, argument in (("memory", self.memory), ("grid", self.grid)):
            if argument is not None:
                raise ValueError(
                    f"`{name}` needs a `query_block`. Received: {name}={argument!r}, "
                    "query_block=None"
                )
        if self.window is None:
            self._set(window=WINDOW)
        check_positive_int("window", self.window)

    def _check_grid(self):
        if not is_pair(self.query_block, 1):
            raise ValueError(
                "`query_block` must be a positive integer, or a pair of them. "
                f"Received: query_block={self.query_block!r}"
            )
        if not is_pair(self.memory, 0):
            raise ValueError(
                "`memory` must be a pair of integers that are not negative, because "
                f"`query_block` is a pair. Received: memory={self.memory!r}"
            )
        if not is_pair(self.grid, 1):
            raise ValueError(
                "`grid` must be a pair, the rows and columns of the image, because "
                f"`query_block` is a pair. Received: grid={self.grid!r}"
            )

    def _check_blocks(self):
        if not is_positive_int(self.query_block):
            raise ValueError(
                "`query_block` must be a positive integer, or a pair of them. "
                f"Received: query_block={self.query_block!r}"
            )
        if not is_int(self.memory) or self.memory < 0:
            raise ValueError(
                "`memory` must be an integer that is not negative, because "
                f"`query_block` is an integer. Received: memory={self.memory!r}"
            )
        if self.grid is not None:
            raise ValueError(
                "`grid` needs a `query_block` of two sizes. Received: "
                f"grid={self.grid!r}, query_block={self.query_block!r}"
            )

    def _set(self, **fields):
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def local_pairs(length, causal, config):
    """Number of visible query-key pairs per head; `None` if unknown."""
    query_block, memory = config.query_block, config.memory
    if config.window is not None:
        return count_pairs(min(config.window, length), length, causal)
    if not config.is_grid:
        i = np.arange(length)
        start = i - i % query_block
        last = start + query_block - 1 + memory
        last = i if causal else np.minimum(last, length - 1)
        return int((last - np.maximum(start - memory, 0) + 1).sum())
    rows, columns = config.grid
    if length != rows * columns:
        return None
    (height, width), (above, beside) = query_block, memory
    row, column = np.divmod(np.arange(length), columns)
    top, left = row - row % height, column - column % width
    right = np.minimum(left + width, columns)
    first_row, first = np.maximum(top - above, 0), np.maximum(left - beside, 0)
    across = np.minimum(left + width + beside, columns) - first
    if not causal:
        down = np.minimum(top + height + above, rows) - first_row
        return int((down * across).sum())
    if config.grid_order == "raster":
        return int(((row - first_row) * across + column - first + 1).sum())
    done = (np.minimum(top + height, rows) - top) * (left - first)
    own = (row - top) * (right - left) + column - left + 1
    return int(((top - first_row) * across + done + own).sum())
