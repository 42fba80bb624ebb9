"""The window and the ramp of attention with a span."""

import dataclasses

from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_positive_number,
)

RAMP = 32


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """The window, and the ramp at the end of a span; checks its values.

    Args:
        window: Positive integer: a query sees itself and at most `window - 1` earlier
            keys and, if not causal, as many later ones.
        ramp: Positive number: positions over which the soft mask falls from 1 to 0.
            Defaults to 32.
        include_self: Whether a query sees the key of its own position. Defaults to
            `True`.
        kernels: Whether the device's kernels may compute. Defaults to `True`.

    Raises:
        ValueError: If a number is not positive, or `include_self` no boolean.
    """

    window: int
    ramp: float = RAMP
    include_self: bool = True
    kernels: bool = True

    def __post_init__(self):
        check_positive_int("window", self.window)
        check_positive_number("ramp", self.ramp)
        check_bool("include_self", self.include_self)
