"""The options of attention over quantised keys."""

import dataclasses

from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.plan import block_sizes

ORDERS = (0, 2)


@dataclasses.dataclass(frozen=True)
class VQConfig:
    """The keys that a query sees exactly, and the codes of the others.

    Attributes:
        soft: Whether a key has a share in every code instead of the nearest only.
        order: 0, or 2 to expand far keys around their codes to second order.
        rank: With `order=2`, the number of coordinates that are expanded; `None`
            for all.
        window: Number of nearest keys that are seen exactly; `None` for none.
        quantize_window: Whether keys in the window are also replaced by their codes.
        relative_positions: Whether logits in the window have a term for the distance.
        gradient_through_cache: Whether keys, values and codes get a gradient through
            the weights beyond the window.
        block_length: Positions per block; `None` for the plan's.
        kernels: Whether the device's kernels may compute.

    Raises:
        ValueError: For options that are invalid or exclude each other.
    """

    soft: bool = False
    order: int = 0
    rank: int | None = None
    window: int | None = None
    quantize_window: bool = False
    relative_positions: bool = False
    gradient_through_cache: bool = True
    block_length: int | None = None
    kernels: bool = True

    def __post_init__(self):
        for argument in ("window", "block_length", "rank"):
            check_positive_int(argument, getattr(self, argument), optional=True)
        if isinstance(self.order, bool | float) or self.order not in ORDERS:
            raise ValueError(f"`order` must be 0 or 2. Received: order={self.order!r}")
        if self.order == 0 and self.rank is not None:
            raise ValueError(
                f"`rank` needs `order=2`. Received: order=0, rank={self.rank}"
            )
        if self.window is None and (self.quantize_window or self.relative_positions):
            raise ValueError(
                "`quantize_window` and relative positions need a `window`. Received: "
                f"quantize_window={self.quantize_window}, "
                f"relative_positions={self.relative_positions}, window=None"
            )
        if self.quantize_window and self.soft:
            raise ValueError(
                "`quantize_window` puts the nearest code in the place of a key, and "
                "excludes soft codes, those with a `sigma`. Received both."
            )
        if self.order == 2 and (self.soft or self.quantize_window):
            raise ValueError(
                "`order=2` expands keys around their nearest codes, and excludes "
                "`quantize_window` and soft codes, those with a `sigma`. Received: "
                f"quantize_window={self.quantize_window}, soft={self.soft}"
            )

    def check_key_dim(self, key_dim):
        """Raises `ValueError` for a `rank` above the keys' dim."""
        if self.rank is not None and self.rank > key_dim:
            raise ValueError(
                "`rank` must be None or an integer from 1 to the dim of the keys, "
                f"{key_dim}. Received: rank={self.rank}"
            )

    def expanded_dims(self, key_dim):
        """The number of coordinates, the first ones, that `order=2` expands."""
        return key_dim if self.rank is None else self.rank

    def block_size(self, num_codes):
        """Positions per block, from the argument or the plan."""
        if self.block_length is not None:
            return self.block_length
        plan = block_sizes()
        if self.order:
            return plan.expanded_code_block
        # The sums of all codes are read and written once per block.
        return max(plan.code_block, min(plan.largest_code_block, num_codes // 2))

    @property
    def longest_in_pairs(self):
        """With `order=2`, the longest sequence that is computed in one block."""
        if self.block_length is not None:
            return self.block_length
        return block_sizes().expanded_code_pairs
