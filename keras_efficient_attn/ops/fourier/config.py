"""The options of Fourier attention."""

import dataclasses

from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.fourier.kernel import check_power

IMPLEMENTATIONS = (None, "tiled", "fused", "reference")


@dataclasses.dataclass(frozen=True)
class FourierConfig:
    """The kernel, the causality and the implementation.

    Attributes:
        power: 2, 4, 6 or 8.
        causal: Whether a query sees no later keys.
        chunk_size: Minimum number of queries per tile; `None` for the default.
        implementation: One of `IMPLEMENTATIONS`.

    Raises:
        ValueError: For invalid options.
    """

    power: int = 4
    causal: bool = False
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        check_power(self.power)
        check_positive_int("chunk_size", self.chunk_size, optional=True)
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"`implementation` must be one of {IMPLEMENTATIONS}. Received: "
                f"implementation={self.implementation!r}"
            )

    @property
    def is_fused(self):
        """Whether PyTorch compiles the kernel."""
        return self.implementation == "fused"

    @property
    def tile_size(self):
        """Minimum number of queries per tile."""
        return self.chunk_size or block_sizes().fourier_tile
