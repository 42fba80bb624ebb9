"""Stores decisions that a second run of a function must not change.

A bucket or a code is an argmax. Rebuilt inputs differ from the original inputs by
rounding errors, which could change it.
"""

import contextlib

from keras_efficient_attn.ops.common.backend import BACKEND

# Not empty while a half of a reversible chain is running.
RECORDS = []


def cache_for_backward(compute):
    """`compute()`; in the backward pass of a reversible chain, the stored value.

    Args:
        compute: Callable without arguments that returns a tensor without a gradient.
    """
    return RECORDS[-1](compute) if RECORDS else compute()


@contextlib.contextmanager
def record_values():
    """Context that appends computed values to the list that it yields."""
    values = []

    def record(compute):
        values.append(compute())
        return values[-1]

    RECORDS.append(record)
    try:
        yield values
    finally:
        RECORDS.pop()


@contextlib.contextmanager
def replay_values(values):
    """Context that returns these values, in the same order."""
    values = iter(values)
    RECORDS.append(lambda compute: next(values))
    try:
        yield
    finally:
        RECORDS.pop()


if BACKEND == "torch":
    from keras_efficient_attn.ops.common.private_torch import in_backward_pass


def is_replay():
    """Whether a backward pass is rerunning this forward pass.

    `keras.remat` around a layer, or around anything that contains it, calls it once
    for the output and, on TensorFlow and PyTorch, once more for the gradients. Side
    effects of a call must not happen twice. JAX differentiates the recorded computation
    and calls nothing again. A reversible chain also runs its halves twice, each time
    from the first state, and drops the updates of the second run.
    """
    if RECORDS:
        return False
    if BACKEND == "torch":
        return in_backward_pass()
    if BACKEND == "tensorflow":
        from keras_efficient_attn.ops.common.private_tensorflow import in_recomputation

        return in_recomputation()
    return False
