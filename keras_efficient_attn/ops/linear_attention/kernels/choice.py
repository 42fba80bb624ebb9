"""Which kernel computes a call, if any."""

import importlib

import keras

from keras_efficient_attn.ops.common.backend import backend_name
from keras_efficient_attn.ops.common.plan import has_one_tpu

DTYPES = ("float32", "bfloat16")
MOST_DIM = 512
# The default number of random features for heads of 128 is 622.
MOST_FEATURES = 1024


def choose_kernel(query, key, value, state, config):
    """The module of the kernel that computes a call; `None`: the chunked form does.

    Args:
        query, key, value: `(batch, length, heads, dim)`.
        state: The state's tensors, by name, or `None`.
        config: `LinearAttentionConfig`.

    Raises:
        ValueError: If the configuration names a kernel that cannot run.
    """
    named = config.implementation == "pallas"
    if not named and (config.implementation is not None or not has_one_tpu()):
        return None
    reason = _obstacle(query, key, value, state, config)
    if reason is None:
        return importlib.import_module(f"{__package__}.pallas")
    if named:
        raise ValueError(f"`implementation='pallas'` {reason}")
    return None


def _obstacle(query, key, value, state, config):
    """Why the kernel cannot compute a call, or `None`."""
    if backend_name() != "jax":
        return f"needs the backend 'jax'. Received: {backend_name()!r}"
    if config.chunk_size is not None:
        return f"takes no `chunk_size`. Received: chunk_size={config.chunk_size}"
    tensors = (query, key, value, *(state or {}).values())
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in tensors]
    if not set(dtypes) <= set(DTYPES):
        wrong = next(dtype for dtype in dtypes if dtype not in DTYPES)
        return f"computes with {' and '.join(DTYPES)}. Received: {wrong}"
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    sizes = [size for shape in shapes for size in shape]
    if not all(isinstance(size, int) for size in sizes):
        return f"needs sizes that are known. Received: shapes {shapes}"
    if 0 in sizes:
        return f"needs a batch and positions. Received: shapes {shapes}"
    dims = {"head_dim": query.shape[-1], "value_dim": value.shape[-1]}
    if max(dims.values()) > MOST_DIM:
        return f"holds heads of at most {MOST_DIM}. Received: {dims}"
    if config.num_features > MOST_FEATURES:
        return (
            f"holds at most {MOST_FEATURES} features. Received: {config.num_features}"
        )
    return None
