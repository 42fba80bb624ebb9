"""Stores decisions that a second run of a function must not change.

A bucket or a code is an argmax. Rebuilt inputs differ from the original inputs by
rounding errors, which could change it.
"""

import contextlib

_records = []


def in_chain():
    """Whether a half of a reversible chain is running."""
    return bool(_records)


def cache_for_backward(compute):
    """`compute()`; in the backward pass of a reversible chain, the stored value.

    Args:
        compute: Callable without arguments that returns a tensor without a gradient.
    """
    return _records[-1](compute) if _records else compute()


@contextlib.contextmanager
def record_values():
    """Context that appends computed values to the list that it yields."""
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
def replay_values(values):
    """Context that returns these values, in the same order."""
    values = iter(values)
    _records.append(lambda compute: next(values))
    try:
        yield
    finally:
        _records.pop()
