"""Sequences of positions that are a step apart, as rows of a batch."""

from keras import ops

from keras_efficient_attn.ops.common.chunking import by_column, by_row


def sequences(step, *tensors):
    """`(batch, length, ...)` as `(batch · step, length / step, ...)`; keeps `None`.

    Args:
        step: Positions from one of a sequence to its next; divides the length.
        *tensors: Tensors, or `None`.
    """

    def split(x):
        x = by_column(x, x.shape[1] // step, step)
        return ops.reshape(x, (-1, *x.shape[2:]))

    return [x if x is None or step == 1 else split(x) for x in tensors]


def interleave(step, *tensors):
    """Undoes `sequences`, as a list."""

    def join(x):
        return by_row(ops.reshape(x, (-1, step, *x.shape[1:])))

    return [x if step == 1 else join(x) for x in tensors]
