"""Depthwise convolutions along a sequence."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.common.state import keep_last


def depthwise(x, kernel, before=0, after=0, documents=None):
    """`y[t] = Σ_i kernel[i] ⊙ x[t + i - before]`, with zeros around `x`.

    Args:
        x: `(batch, length, ...)`.
        kernel: `(kernel_size, ...)`.
        before, after: Zeros before the first position and after the last; the output
            has `length + before + after - kernel_size + 1` positions.
        documents: The `Documents` of `x`, of which a position reads its own; the output
            has as many positions. Defaults to `None`: one in each row.
    """
    places = () if documents is None else (documents.position, documents.later)
    kernel = ops.cast(kernel, x.dtype)
    step, gradient = _depthwise(kernel.shape[0], before, after)
    arguments = (), (x, *places), (kernel,)
    if isinstance(x.shape[1], int) and x.shape[1] + before + after == kernel.shape[0]:
        return step(*arguments)[1][0]
    _, (output,) = recompute_scan(step, *arguments, gradient, num_steps=1)
    return output


@functools.cache
def _depthwise(size, before, after):
    """`(step, gradient)` for `recompute_scan`, which takes one step.

    XLA's derivative of the slices and of their sums takes six times as long. Here both
    are slices of a padded tensor, which XLA reads where the step before wrote it.
    """

    def of_document(x, i, position, later):
        """`(batch, length, ...)`, 0 where the tap `i` reads another document."""
        if i == before:
            return x
        near = later >= i - before if i > before else position >= before - i
        near = ops.reshape(near, (*shape_of(near), *[1] * (len(x.shape) - 2)))
        return ops.where(near, x, ops.zeros_like(x))

    def step(carry, xs, consts):
        (x, *places), (kernel,) = xs, consts
        length = shape_of(x)[1] + before + after - size + 1
        tail = [(0, 0)] * (len(x.shape) - 2)
        padded = pad(x, [(0, 0), (before, after), *tail])
        taps = (padded[:, i : i + length] for i in range(size))
        if places:
            taps = (of_document(x, i, *places) for i, x in enumerate(taps))
        return (), (sum(kernel[i] * x for i, x in enumerate(taps)),)

    def gradient(carry, xs, consts, y, grad_carry, grad_y):
        (x, *places), (kernel,), (grad,) = xs, consts, grad_y
        length, given = shape_of(grad)[1], shape_of(x)[1]
        tail = [(0, 0)] * (len(x.shape) - 2)
        padded = pad(x, [(0, 0), (before, after), *tail])
        around = [(0, 0), (size - 1 - before, size - 1 - after), *tail]
        grad_x, grad_kernel = 0.0, []
        for i in range(size):
            own = of_document(grad, i, *places) if places else grad
            spread = pad(own, around)[:, size - 1 - i :][:, :given]
            grad_x = grad_x + kernel[i] * spread
            grad_kernel.append(ops.sum(padded[:, i : i + length] * own, axis=(0, 1)))
        places = map(ops.zeros_like, places)
        return (), (grad_x, *places), (ops.stack(grad_kernel),)

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
    reach = kernel.shape[0] - 1
    if past is None:
        return depthwise(x, kernel, reach, documents=documents), None
    padded = ops.concatenate([ops.cast(past, x.dtype), x], axis=1)
    return depthwise(padded, kernel), keep_last(padded, shape_of(x)[1], lengths)
