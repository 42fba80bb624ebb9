"""Depthwise convolutions along a sequence."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.state import keep_last


def depthwise(padded, kernel, length):
    """`y[t] = Σ_i kernel[i] ⊙ padded[t + i]` for the first `length` positions t.

    Args:
        padded: `(batch, length + kernel_size - 1, ...)`.
        kernel: `(kernel_size, ...)`.
        length: Length of the output.
    """
    return sum(kernel[i] * padded[:, i : i + length] for i in range(kernel.shape[0]))


def causal_convolution(x, kernel, past=None, lengths=None, documents=None):
    """`depthwise` of each position and those before it.

    Args:
        x: `(batch, length, ...)`.
        kernel: `(kernel_size, ...)`; its last entry is for the position itself.
        past: The `kernel_size - 1` inputs before `x`; `None` for zeros.
        lengths: Integers `(batch,)`: the positions of each row that exist, at its
            beginning. Defaults to `None`: all.
        documents: The `Documents` of `x`, without a `past`. Defaults to `None`: one in
            each row.

    Returns:
        `(output, last)`: the output, and the last `kernel_size - 1` inputs that exist;
        `None` without `past`.
    """
    length, reach = shape_of(x)[1], kernel.shape[0] - 1
    before = past
    if past is None:
        before = ops.zeros((shape_of(x)[0], reach, *x.shape[2:]), x.dtype)
    padded = ops.concatenate([ops.cast(before, x.dtype), x], axis=1)
    kernel = ops.cast(kernel, x.dtype)
    if documents is None:
        output = depthwise(padded, kernel, length)
    else:
        position = ops.reshape(
            documents.position, (-1, length, *[1] * (len(x.shape) - 2))
        )
        output = sum(
            kernel[reach - back]
            * ops.where(position >= back, padded[:, reach - back :][:, :length], 0.0)
            for back in range(reach + 1)
        )
    return output, None if past is None else keep_last(padded, length, lengths)
