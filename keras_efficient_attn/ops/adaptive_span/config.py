"""The window and the ramp of attention with a span."""

import dataclasses

from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_positive_number,
)

RAMP = 32


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """How far a query can see, and how softly a span ends; checks itself.

    Args:
        window: Positive integer: a query sees itself and at most `window - 1` earlier
            keys and, if not causal, as many later ones.
        ramp: Positive number: positions over which the soft mask falls from 1 to 0.
            Defaults to 32.

    Raises:
        ValueError: If an argument is not positive.
    """

    window: int
    ramp: float = RAMP

    def __post_init__(self):
        check_positive_int("window", self.window)
        check_positive_number("ramp", self.ramp)
