"""Chooses the backend's kernel for a call of softmax attention, if any."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_near
from keras_efficient_attn.ops.common.checks import can_run_kernel
from keras_efficient_attn.ops.common.interval_softmax.intervals import NearKeys
from keras_efficient_attn.ops.common.plan import has_one_tpu

# The backend that provides each kernel.
KERNELS = {"splash": "jax", "flex": "torch"}
DTYPES = ("float32", "bfloat16", "float16")
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
    query, key, value, _ = call.inputs
    name = call.implementation
    named = name is not None
    if not named:
        name = _preferred_name(query)
    if name not in KERNELS:
        return None
    reason = (
        _call_obstacle(call)
        or _obstacle(name, query, key, value)
        or config.kernel_obstacle(name, call.options.causal)
    )
    return _module(name) if can_run_kernel(name, reason, named) else None


def _module(name):
    # Written as statements, which `torch.compile` can trace.
    if name == "splash":
        from keras_efficient_attn.ops.common.interval_softmax import splash as module
    else:
        from keras_efficient_attn.ops.common.interval_softmax import flex as module
    return module


def attend_window(query, key, value, valid, window, dtype, relative=None):
    """Computes `block_softmax.attend_near` by the device's kernel, if it can.

    Args:
        query, key, value, relative: As for `attend_near`.
        valid: As for `attend_near`, or `None` if all keys exist.
        window: `SlidingWindow`.
        dtype: In which a kernel multiplies; `None` for blocks.
    """
    name = None
    if dtype is not None and relative is None:
        name = _preferred_name(query)
    if name is not None:
        tensors = [ops.cast(x, dtype) for x in (query, key, value)]
        if _obstacle(name, *tensors) is None:
            pattern = NearKeys(window, key.shape[1])
            return _module(name).attend_part(*tensors, valid, pattern, 1.0)
    if valid is None:
        valid = ops.ones(shape_of(key)[:2], query.dtype)
    return attend_near(query, key, value, valid, window, relative=relative)


def _preferred_name(query):
    """The name of the device's kernel, or `None`."""
    backend = BACKEND
    if backend == "jax":
        return "splash" if has_one_tpu() else None
    if backend == "torch" and query.is_cuda:
        return "flex"
    return None


def _call_obstacle(call):
    """The argument of a call that no kernel takes, as a reason, or `None`."""
    for argument, given in (
        ("state", call.state is not None),
        ("dropout", call.options.dropout),
    ):
        if given:
            return f"takes no `{argument}`. Received: one"
    return None


def _obstacle(name, *tensors):
    """The reason why a kernel cannot read a query, a key and a value, or `None`."""
    if BACKEND != KERNELS[name]:
        return f"needs the backend {KERNELS[name]!r}. Received: {BACKEND!r}"
    if name == "splash":
        from keras_efficient_attn.ops.common import private_jax

        reason = private_jax.splash_obstacle()
        if reason is not None:
            return reason
    for x in tensors:
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype not in DTYPES:
            return f"computes with {', '.join(DTYPES)}. Received: {dtype}"
    shapes = [tuple(x.shape) for x in tensors]
    sizes = [size for shape in shapes for size in shape]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"needs a batch and positions, of known sizes. Received: shapes {shapes}"
    if name == "flex" and tensors[0].is_cuda and min(s[-1] for s in shapes) < LEAST_DIM:
        return f"needs heads of at least {LEAST_DIM}. Received: shapes {shapes}"
    return None
