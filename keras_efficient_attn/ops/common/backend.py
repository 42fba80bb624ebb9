"""Queries about the current backend, in one place."""

import importlib

import keras
from keras import ops

BACKENDS = ("jax", "tensorflow", "torch")


def backend_name():
    """`"jax"`, `"tensorflow"` or `"torch"`.

    Raises:
        ValueError: If Keras runs on another backend.
    """
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise ValueError(
            "keras_efficient_attn needs the Keras backend 'tensorflow', 'jax' or "
            f"'torch'. Received: keras.backend.backend()={name!r}"
        )
    return name


def is_traced_by_torch():
    """Whether `torch.compile` is tracing the caller."""
    if backend_name() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()


def are_values_known(x):
    """Whether a tensor's values are available to Python: on PyTorch's CPUs."""
    if backend_name() != "torch" or is_traced_by_torch():
        return False
    return x.device.type == "cpu"


def is_kept_on_cpu(x):
    """Whether PyTorch keeps a tensor on this process's CPU.

    An exported program may run anywhere.
    """
    import torch

    return x.device.type == "cpu" and not torch.compiler.is_exporting()


def pick(default=None, **values):
    """The value for the current backend, such as `pick(4, torch=1)`."""
    return values.get(backend_name(), default)


def backend_module(package):
    """The module of a package that is named after the backend.

    Call it at import time: `torch.compile` cannot trace an import.
    """
    return importlib.import_module(f"{package}.{backend_name()}")


def shape_of(x):
    """`ops.shape`, with few operations for TensorFlow's dynamic sizes."""
    if backend_name() != "tensorflow" or None not in x.shape:
        return ops.shape(x)
    import tensorflow as tf

    sizes = tf.unstack(tf.shape(x))
    return tuple(s if n is None else n for n, s in zip(x.shape, sizes, strict=True))
