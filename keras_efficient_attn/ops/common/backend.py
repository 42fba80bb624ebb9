"""Which backend runs, asked in one place."""

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
    """Whether `torch.compile` is making a program of what calls this."""
    if backend_name() != "torch":
        return False
    import torch

    return torch.compiler.is_compiling()


def are_values_known(x):
    """Whether sizes may depend on a tensor's values: PyTorch has them on CPUs."""
    if backend_name() != "torch" or is_traced_by_torch():
        return False
    return x.device.type == "cpu"


def is_kept_on_cpu(x):
    """Whether PyTorch has, or will have, a tensor on a CPU, and in this process.

    An exported program may run anywhere.
    """
    import torch

    return x.device.type == "cpu" and not torch.compiler.is_exporting()


def pick(default=None, **values):
    """The value for the backend that runs, such as `pick(4, torch=1)`."""
    return values.get(backend_name(), default)


def backend_module(package):
    """The module of a package that is named for the backend.

    To be asked while modules are imported: `torch.compile` cannot trace an import.
    """
    return importlib.import_module(f"{package}.{backend_name()}")


def shape_of(x):
    """`ops.shape`, with few operations for sizes that TensorFlow does not know yet."""
    if backend_name() != "tensorflow" or None not in x.shape:
        return ops.shape(x)
    import tensorflow as tf

    sizes = tf.unstack(tf.shape(x))
    return tuple(s if n is None else n for n, s in zip(x.shape, sizes, strict=True))
