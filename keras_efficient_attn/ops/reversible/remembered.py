"""Decisions that a second run of a function must not take again.

A bucket or a code is an argmax: rebuilt inputs differ from the first ones by rounding,
and could tip it.
"""

import contextlib

_records = []


def in_chain():
    """Whether a half of a reversible chain is running."""
    return bool(_records)


def remembered(compute):
    """`compute()`; in the backward pass of a reversible chain, its first value again.

    Args:
        compute: Callable without arguments that returns a tensor without a gradient.
    """
    return _records[-1](compute) if _records else compute()


@contextlib.contextmanager
def recording():
    """Within, appends what is computed to the list that it yields."""
    values = []

    def record(compute):
        values.append(compute())
        return values[-1]

    _records.append(record)
    try:
        yield values
    finally:
        _records.pop()


@contextlib.contextmanager
def replaying(values):
    """Within, gives these values, in the same order."""
    values = iter(values)
    _records.append(lambda compute: next(values))
    try:
        yield
    finally:
        _records.pop()
