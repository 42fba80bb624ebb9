"""Depthwise convolutions along a sequence."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.scan import recompute_scan
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
    places = () if documents is None else (documents.position, documents.later)
    kernel = ops.cast(kernel, padded.dtype)
    step, gradient = _depthwise(kernel.shape[0], before if places else None)
    if isinstance(length, int) and length == 1:
        return step((), (padded, *places), (kernel,))[1][0]
    _, (output,) = recompute_scan(
        step, (), (padded, *places), (kernel,), gradient, num_steps=1
    )
    return output


@functools.cache
def _depthwise(size, before):
    """`(step, gradient)` for `recompute_scan`, which takes one step.

    XLA's derivative of the slices and of their sums takes six times as long.
    """

    def of_document(x, i, position, later):
        """`(batch, length, ...)`, 0 where the tap `i` reads another document."""
        if i == before:
            return x
        near = later >= i - before if i > before else position >= before - i
        near = ops.reshape(near, (*shape_of(near), *[1] * (len(x.shape) - 2)))
        return ops.where(near, x, ops.zeros_like(x))

    def step(carry, xs, consts):
        (padded, *places), (kernel,) = xs, consts
        length = shape_of(padded)[1] - size + 1
        taps = (padded[:, i : i + length] for i in range(size))
        if places:
            taps = (of_document(x, i, *places) for i, x in enumerate(taps))
        return (), (sum(kernel[i] * x for i, x in enumerate(taps)),)

    def gradient(carry, xs, consts, y, grad_carry, grad_y):
        (padded, *places), (kernel,), (grad,) = xs, consts, grad_y
        length, whole = shape_of(grad)[1], shape_of(padded)[1]
        axes = (0, 1)
        around = [(0, 0), (size - 1, size - 1), *[(0, 0)] * (len(grad.shape) - 2)]
        grad_padded, grad_kernel = 0.0, []
        for i in range(size):
            own = of_document(grad, i, *places) if places else grad
            spread = pad(own, around)[:, size - 1 - i : size - 1 - i + whole]
            grad_padded = grad_padded + kernel[i] * spread
            grad_kernel.append(ops.sum(padded[:, i : i + length] * own, axis=axes))
        places = map(ops.zeros_like, places)
        return (), (grad_padded, *places), (ops.stack(grad_kernel),)

    return step, gradient


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
    if past is None:
        # Not a concatenation, for which XLA would move positions split over devices.
        padded = pad(x, [(0, 0), (reach, 0), *[(0, 0)] * (len(x.shape) - 2)])
    else:
        padded = ops.concatenate([ops.cast(past, x.dtype), x], axis=1)
    output = depthwise(padded, kernel, length, documents, reach)
    return output, None if past is None else keep_last(padded, length, lengths)
