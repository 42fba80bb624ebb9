"""Chooses the backend's kernel for a call of softmax attention, if any."""

from keras import ops

from keras_efficient_attn.ops.common import kernels
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_near
from keras_efficient_attn.ops.common.interval_softmax.intervals import NearKeys
from keras_efficient_attn.ops.common.plan import has_kernels

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = {
    "splash": kernels.Kernel("jax", DTYPES),
    "flex": kernels.Kernel("torch", DTYPES),
}
# FlexAttention's compiler refuses smaller heads.
LEAST_DIM = 16


def choose_kernel(call, config):
    """The module of the kernel for a call; `None` means blocks.

    Its `attend(query, key, value, valid, pattern, scale)` returns the output, in the
    dtype of `value`: from queries, keys and values `(batch, length, heads, dim)`, the
    last two finite; `valid`, `(batch, keys)` or `(batch, keys, heads)`, nonzero for
    keys that exist, or `None` if all exist; the pattern of the keys that a query sees,
    as in `intervals`; and the factor of the dot products. Its `attend_interleaved`
    takes parts instead of the pattern: pairs of a step, and of a pattern for each
    sequence of positions that are a step apart. The parts share no key.

    Args:
        call: `SoftmaxCall`.
        config: The pattern; `kernel_obstacle(name, causal)` is the reason why a kernel
            cannot compute it, or `None`.

    Raises:
        ValueError: If the call names a kernel that cannot run.
    """
    asked = call.implementation
    tensors = call.inputs[:3]
    if asked not in KERNELS and (asked is not None or not has_kernels(tensors[0])):
        return None

    def obstacle(name, tensors):
        return (
            _call_obstacle(call)
            or _obstacle(name, tensors)
            or config.kernel_obstacle(name, call.options.causal)
        )

    return _module(kernels.choose(KERNELS, asked, tensors, obstacle))


def _module(name):
    # Written as statements, which `torch.compile` can trace.
    if name is None:
        return None
    if name == "splash":
        from keras_efficient_attn.ops.common.interval_softmax import splash as module
    else:
        from keras_efficient_attn.ops.common.interval_softmax import flex as module
    return module


def attend_window(tensors, valid, window, dtype, relative=None, documents=None):
    """Computes `block_softmax.attend_near` by the device's kernel, if it can.

    Args:
        tensors: `(query, key, value)`, as for `attend_near`.
        relative, documents: As for `attend_near`. Exclude kernels.
        valid: As for `attend_near`, or `None` if all keys exist.
        window: `SlidingWindow`.
        dtype: In which a kernel multiplies; `None` for blocks.
    """
    query, key, value = tensors
    exact = dtype is None or relative is not None or documents is not None
    if not exact and has_kernels(query):
        narrow = [ops.cast(x, dtype) for x in tensors]
        kernel = _module(kernels.choose(KERNELS, None, narrow, _obstacle))
        if kernel is not None:
            pattern = NearKeys(window, key.shape[1])
            return kernel.attend_part(*narrow, valid, pattern, 1.0)
    if valid is None:
        valid = ops.ones(shape_of(key)[:2], query.dtype)
    return attend_near(
        query, key, value, valid, window, relative=relative, documents=documents
    )


def _call_obstacle(call):
    """The argument of a call that no kernel takes, as a reason, or `None`."""
    for argument, given in (
        ("state", call.state is not None),
        ("dropout", call.options.dropout),
        ("document_ids", call.rows.documents is not None),
    ):
        if given:
            return f"does not support `{argument}`. Received: {argument}"
    return None


def _obstacle(name, tensors):
    """The reason why a kernel cannot compute heads of a query, a key and a value."""
    if name == "splash":
        from keras_efficient_attn.ops.common import private_jax

        return private_jax.splash_obstacle()
    shapes = [tuple(x.shape) for x in tensors]
    if tensors[0].is_cuda and min(shape[-1] for shape in shapes) < LEAST_DIM:
        return f"needs heads of at least {LEAST_DIM}. Received: shapes {shapes}"
    return None
