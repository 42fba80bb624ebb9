"""Queries about the current backend, in one place."""

import importlib

import keras
from keras import ops

BACKENDS = ("jax", "tensorflow", "torch")


def known_backend(name):
    """The name of a backend that the package knows.

    Raises:
        ValueError: For another backend.
    """
    if name not in BACKENDS:
        raise ValueError(
            "keras_efficient_attn needs the Keras backend 'tensorflow', 'jax' or "
            f"'torch'. Received: keras.backend.backend()={name!r}"
        )
    return name


# The backend of this process: Keras reads it once, when it is imported.
BACKEND = known_backend(keras.backend.backend())
if BACKEND == "torch":
    import torch
elif BACKEND == "jax":
    import jax


def is_traced_by_torch():
    """Whether `torch.compile` is tracing the caller."""
    return BACKEND == "torch" and torch.compiler.is_compiling()


def in_function_transform():
    """Whether a transform of `torch.func`, such as `grad` or `vmap`, calls this.

    It needs operations that PyTorch differentiates and batches itself: no handwritten
    derivatives, no results in place, no values that Python reads.
    """
    if BACKEND != "torch" or torch.compiler.is_compiling():
        return False
    # It imports this module.
    from keras_efficient_attn.ops.common.private_torch import function_transform

    return function_transform is not None and function_transform() is not None


def is_traced(x):
    """Whether a tensor has no values yet: a program is being compiled."""
    if BACKEND == "jax":
        return isinstance(x, jax.core.Tracer)
    if BACKEND == "tensorflow":
        return not hasattr(x, "numpy")
    return is_traced_by_torch()


def are_values_known(x):
    """Whether a tensor's values are available to Python: on PyTorch's CPUs."""
    if BACKEND != "torch" or is_traced_by_torch():
        return False
    return x.device.type == "cpu"


def pick(default=None, **values):
    """The value for the current backend, such as `pick(4, torch=1)`."""
    return values.get(BACKEND, default)


def backend_module(package):
    """The module of a package that is named after the backend.

    Call it at import time: `torch.compile` cannot trace an import.
    """
    return importlib.import_module(f"{package}.{BACKEND}")


def attribute_or_none(module, path):
    """What a module holds under names joined by dots, `None` if it does not."""
    found = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def private_name_error(library, version, name, works_with):
    """The error for a library that has lost a private function without a substitute.

    Args:
        library: Name of the library.
        version: Its version.
        name: The function's whole name.
        works_with: A version of the library that has the function.
    """
    return RuntimeError(
        f"keras_efficient_attn needs {name}, a private function of {library}, to know "
        f"that gradient checkpointing reruns a layer: install {library} {works_with}, "
        f"which has it. Received: {library} {version}"
    )


def shape_of(x):
    """`ops.shape`, with few operations for TensorFlow's dynamic sizes."""
    if BACKEND != "tensorflow" or None not in x.shape:
        return ops.shape(x)
    import tensorflow as tf

    sizes = tf.unstack(tf.shape(x))
    return tuple(s if n is None else n for n, s in zip(x.shape, sizes, strict=True))
