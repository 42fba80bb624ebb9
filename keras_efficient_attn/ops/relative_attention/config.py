"""The geometry of attention with relative positions."""

import dataclasses

from keras_efficient_attn.ops.common.checks import check_int, check_positive_int


@dataclasses.dataclass(frozen=True)
class RelativeConfig:
    """The positions of queries among keys, and their window; checks its values.

    Args:
        offset: Position of the first query, where the first key has position 0.
            Defaults to 0.
        window: Positive integer: only distances below it are visible. Defaults to
            `None`: all distances.

    Raises:
        ValueError: If an argument is not an integer in its range.
    """

    offset: int = 0
    window: int | None = None

    def __post_init__(self):
        check_int("offset", self.offset, 0)
        check_positive_int("window", self.window, optional=True)
