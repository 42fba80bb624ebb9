"""Numbers of query-key pairs in local patterns."""

import numpy as np

from keras_efficient_attn.ops.common.pairs import count_pairs


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
    if config.order == "raster":
        return int(((row - first_row) * across + column - first + 1).sum())
    done = (np.minimum(top + height, rows) - top) * (left - first)
    own = (row - top) * (right - left) + column - left + 1
    return int(((top - first_row) * across + done + own).sum())
