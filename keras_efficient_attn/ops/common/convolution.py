"""Depthwise convolutions along a sequence."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.common.state import keep_last

if BACKEND == "torch":
    import torch


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

    XLA's derivative of the slices and of their sums takes six times as long. Here the
    gradient of `x` is a convolution, too.
    """

    def step(carry, xs, consts):
        (x, *places), (kernel,) = xs, consts
        return (), (_convolve(x, kernel, before, after, places),)

    def gradient(carry, xs, consts, y, grad_carry, grad_y):
        (x, *places), (kernel,), (grad,) = xs, consts, grad_y
        around = size - 1 - before, size - 1 - after
        grad_x = _convolve(grad, ops.flip(kernel, axis=0), *around, places)
        grad_kernel = []
        for i in range(size):
            own = _of_document(grad, i - before, places)
            read, own = _meeting(x, own, i, before, after)
            grad_kernel.append(ops.sum(read * own, axis=(0, 1)))
        places = map(ops.zeros_like, places)
        return (), (grad_x, *places), (ops.stack(grad_kernel),)

    return step, gradient


def _convolve(x, kernel, before, after, places):
    """`depthwise`; `places` are positions in documents from both ends, or empty.

    With PyTorch's convolution, and its slices in `_meeting`, a training step of
    `DeltaAttention` at 8,192 positions takes 0.85 of its time on two CPU cores:
    `python -m tools.compare_forms convolution`.
    """
    size = kernel.shape[0]
    length = shape_of(x)[1] + before + after - size + 1
    own = places or BACKEND != "torch" or x.device.type != "cpu"
    # The library refuses batches without rows.
    own = own or 0 in x.shape
    if own or x.dtype not in (torch.float32, torch.bfloat16):
        padded = pad(x, [(0, 0), (before, after), *[(0, 0)] * (len(x.shape) - 2)])
        taps = (padded[:, i : i + length] for i in range(size))
        taps = (_of_document(tap, i - before, places) for i, tap in enumerate(taps))
        return sum(kernel[i] * tap for i, tap in enumerate(taps))
    # PyTorch's convolution of images does not store each tap's products. Its channels
    # are last in memory, as oneDNN reads them fastest.
    around = max(before, after)
    image = x.reshape(*x.shape[:2], -1).transpose(1, 2)[:, :, None]
    weight = kernel.reshape(size, -1).t()[:, None, None]
    y = torch.nn.functional.conv2d(
        image, weight, padding=(0, around), groups=len(weight)
    )
    y = y[:, :, 0, around - before :][..., :length].transpose(1, 2)
    return y.reshape(*y.shape[:2], *x.shape[2:])


def _meeting(x, y, i, before, after):
    """The positions of `x` that tap `i` reads, and those of `y` that it reads them for.

    On PyTorch all that there are. XLA and TensorFlow take longer for slices that begin
    at other positions: there, all of `y` and zeros around `x`.
    """
    length, given = shape_of(y)[1], shape_of(x)[1]
    if BACKEND != "torch":
        tail = [(0, 0)] * (len(x.shape) - 2)
        return pad(x, [(0, 0), (before, after), *tail])[:, i : i + length], y
    offset = i - before
    first = max(0, -offset)
    last = max(first, min(length, given - offset))
    return x[:, first + offset : last + offset], y[:, first:last]


def _of_document(x, offset, places):
    """`(batch, length, ...)`, 0 where `offset` positions on is another document."""
    if offset == 0 or not places:
        return x
    position, later = places
    near = later >= offset if offset > 0 else position >= -offset
    near = ops.reshape(near, (*shape_of(near), *[1] * (len(x.shape) - 2)))
    return ops.where(near, x, ops.zeros_like(x))


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
