"""Cross-entropy over a large vocabulary, without the logits of all positions."""

import functools

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int, may_agree
from keras_efficient_attn.ops.common.chunking import chunk_count, pad_to
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, max_along
from keras_efficient_attn.ops.common.plan import jit_on_jax, symbolic
from keras_efficient_attn.ops.common.scan import recompute_scan


@symbolic
@jit_on_jax("chunk_size", "ignore_class")
def chunked_cross_entropy(
    hidden,
    kernel,
    bias,
    labels,
    *,
    chunk_size: int = 128,
    ignore_class: int | None = None,
):
    """`-log softmax(hidden · kernel + bias)[label]`, in slices of the sequence.

    Both passes hold the logits of one slice at a time: `batch · chunk_size ·
    vocabulary_size` floats. The loss is 0 for `ignore_class`, and NaN for another label
    that is no class.

    Args:
        hidden: `(batch, length, dim)`.
        kernel: `(dim, vocabulary_size)`.
        bias: `(vocabulary_size,)`, or `None`.
        labels: Integers `(batch, length)`.
        chunk_size: Positions per slice. Defaults to 128.
        ignore_class: Integer: the label of positions without a loss, such as -100.
            Defaults to `None`: none.

    Returns:
        `(batch, length)`, float32 or wider, in nats.

    Raises:
        ValueError: If `chunk_size` is not a positive integer, or shapes do not agree.
    """
    check_positive_int("chunk_size", chunk_size)
    labels = ops.cast(labels, "int32")
    _check_shapes(hidden, kernel, bias, labels)
    dtype = accumulator_dtype(hidden, kernel)
    common = keras.backend.result_type(hidden.dtype, kernel.dtype)
    hidden, kernel = ops.cast(hidden, common), ops.cast(kernel, common)
    length = shape_of(hidden)[1]
    if isinstance(length, int):
        chunk_size = max(1, min(chunk_size, length))
    # Products of NumPy's narrow integers would overflow.
    chunk_size = int(chunk_size)
    chunks = chunk_count(length, chunk_size)
    ignored = None if ignore_class is None else labels == ignore_class
    if ignored is not None:
        labels = ops.where(ignored, 0, labels)
    is_class = ops.logical_and(labels >= 0, labels < kernel.shape[-1])
    # Padding has the label 0 as well.
    known = ops.where(is_class, labels, 0)
    xs = tuple(pad_to(t, chunks * chunk_size) for t in (hidden, known))
    consts = (kernel,) if bias is None else (kernel, bias)
    _, (losses,) = recompute_scan(
        _step(dtype), (), xs, consts, num_steps=chunks, step_size=chunk_size
    )
    losses = losses[:, :length]
    losses = ops.where(is_class, losses, ops.cast(float("nan"), losses.dtype))
    return losses if ignored is None else ops.where(ignored, 0.0, losses)


def _check_shapes(hidden, kernel, bias, labels):
    """Raises `ValueError` for shapes that do not agree."""
    tensors = {"hidden": hidden, "kernel": kernel, "bias": bias, "labels": labels}
    shapes = {n: tuple(x.shape) for n, x in tensors.items() if x is not None}
    dim_and_classes = (*shapes["hidden"][2:], *shapes.get("bias", (None,)))
    if not may_agree(shapes["kernel"], dim_and_classes) or not may_agree(
        shapes["labels"], shapes["hidden"][:2]
    ):
        received = ", ".join(f"{name}.shape={shape}" for name, shape in shapes.items())
        raise ValueError(
            "`hidden`, `kernel`, `bias` and `labels` must have the shapes (batch, "
            "length, dim), (dim, vocabulary_size), (vocabulary_size,) and (batch, "
            f"length). Received: {received}"
        )


@functools.cache
def _step(dtype):
    def step(carry, x, consts):
        hidden, labels = x
        logits = ops.cast(hidden @ consts[0], dtype)
        if len(consts) > 1:
            logits = logits + ops.cast(consts[1], dtype)
        largest = max_along(ops.stop_gradient(logits), axis=-1, keepdims=True)
        logits = logits - largest
        chosen = ops.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return carry, (ops.log(ops.sum(ops.exp(logits), axis=-1)) - chosen,)

    return step
