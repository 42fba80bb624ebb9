"""Chooses the backend's kernel for a call of softmax attention, if any."""

import keras

from keras_efficient_attn.ops.common.backend import backend_name
from keras_efficient_attn.ops.common.checks import can_run_kernel
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
    as in `intervals`; and the factor of the dot products.

    Args:
        call: `SoftmaxCall`.
        config: The pattern; `kernel_obstacle(name, causal)` is the reason why a kernel
            cannot compute it, or `None`.

    Raises:
        ValueError: If the call names a kernel that cannot run.
    """
    named = call.implementation in KERNELS
    name = call.implementation if named else _preferred_name(call)
    if name is None:
        return None
    reason = _obstacle(name, call) or config.kernel_obstacle(name, call.causal)
    return _module(name) if can_run_kernel(name, reason, named) else None


def _module(name):
    # Written as statements, which `torch.compile` can trace.
    if name == "splash":
        from keras_efficient_attn.ops.common.interval_softmax import splash as module
    else:
        from keras_efficient_attn.ops.common.interval_softmax import flex as module
    return module


def _preferred_name(call):
    """The name of the kernel for the device, if no implementation is named."""
    if call.implementation is not None:
        return None
    backend, query = backend_name(), call.inputs[0]
    if backend == "jax":
        return "splash" if has_one_tpu() else None
    if backend == "torch" and query.is_cuda:
        fits = min(query.shape[-1], call.inputs[2].shape[-1]) >= LEAST_DIM
        return "flex" if fits else None
    return None


def _obstacle(name, call):
    """The reason why a kernel cannot compute a call of any pattern, or `None`."""
    if backend_name() != KERNELS[name]:
        return f"needs the backend {KERNELS[name]!r}. Received: {backend_name()!r}"
    for argument in ("state", "dropout"):
        if getattr(call, argument) is not None:
            return f"takes no `{argument}`. Received: one"
    query, key, value, _ = call.inputs
    for x in (query, key, value):
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype not in DTYPES:
            return f"computes with {', '.join(DTYPES)}. Received: {dtype}"
    shapes = [tuple(x.shape) for x in (query, key, value)]
    sizes = [size for shape in shapes for size in shape]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"needs a batch and positions, of known sizes. Received: shapes {shapes}"
    return None
