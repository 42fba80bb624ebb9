"""Which keys a query sees near it; see `block_attention` for what a rule is."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """Itself and `window - 1` earlier keys and, if not causal, as many later ones."""

    window: int
    causal: bool

    period = 1

    @property
    def before(self):
        return self.window - 1

    reach = before

    @property
    def after(self):
        return 0 if self.causal else self.window - 1

    def __call__(self, i, j):
        distance = i - j
        return (distance < self.window) & (distance >= -self.after)


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """The query's own block of `block` positions, and `memory` positions before it.

    If not causal, the whole block, and as many positions after it.
    """

    block: int
    memory: int
    causal: bool

    @property
    def period(self):
        return self.block

    @property
    def before(self):
        return self.memory

    @property
    def after(self):
        return 0 if self.causal else self.memory

    @property
    def reach(self):
        return self.memory + self.block - 1

    def __call__(self, i, j):
        start = i - i % self.block
        end = i if self.causal else start + self.block - 1 + self.memory
        return (j >= start - self.memory) & (j <= end)


@dataclasses.dataclass(frozen=True)
class GridBlocks:
    """The query's own rectangle, and a halo above, left and right of it.

    Positions are those in a grid of `columns` columns, row by row. If not causal, the
    whole rectangle, with a halo below it too.

    Attributes:
        block: Rows and columns of a rectangle.
        memory: Rows above, and columns left and right.
        block_order: Whether images grow rectangle by rectangle, instead of row by row.
        causal: Whether a query sees what came before it in that order only.
        columns: Columns of the grid.
        reach: How far back a query sees, in positions of the order.
    """

    block: tuple
    memory: tuple
    block_order: bool
    causal: bool
    columns: int
    reach: int = 0

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
        # Earlier rectangles: those above, those on the left; later ones: the right.
        own = (key_row >= top) & (key_column >= left)
        earlier = (key_row < top) | (key_column < left)
        return seen & (earlier | (own & raster & (key_column < left + width)))
