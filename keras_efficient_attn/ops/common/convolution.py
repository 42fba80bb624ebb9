"""Depthwise convolutions along a sequence."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.state import keep_last


def depthwise(padded, kernel, length, documents=None, before=None):
    """`y[t] = Σ_i kernel[i] ⊙ padded[t + i]` for the first `length` positions t.

    Args:
        padded: `(batch, length + kernel_size - 1, ...)`.
        kernel: `(kernel_size, ...)`.
        length: Length of the output.
        documents: The `Documents` of the output's positions, of which a position reads
            its own. Defaults to `None`: one in each row.
        before: With `documents`, the padding before the first position.
    """
    terms = []
    for i in range(kernel.shape[0]):
        x = padded[:, i : i + length]
        if documents is not None and i != before:
            near = documents.position >= before - i
            if i > before:
                near = documents.later >= i - before
            near = ops.reshape(near, (-1, length, *[1] * (len(x.shape) - 2)))
            x = ops.where(near, x, ops.zeros_like(x))
        terms.append(kernel[i] * x)
    return sum(terms)


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
    output = depthwise(padded, kernel, length, documents, reach)
    return output, None if past is None else keep_last(padded, length, lengths)
