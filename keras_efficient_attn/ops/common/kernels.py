"""Which kernel of the backend computes a call, if any."""

import typing

import keras

from keras_efficient_attn.ops.common.backend import BACKEND


class Kernel(typing.NamedTuple):
    """A kernel's backend and dtypes.

    Attributes:
        backend: Value of `KERAS_BACKEND`.
        dtypes: Names of the dtypes that it reads.
    """

    backend: str
    dtypes: tuple


def choose(kernels, named, tensors, obstacle):
    """The name of the kernel that computes a call, or `None`.

    Args:
        kernels: Dict of `Kernel`s by name.
        named: Name of the kernel that the caller asks for; `None`: the backend's first.
        tensors: What the kernel reads, the query first.
        obstacle: Function of a kernel's name and of the tensors: the reason why the
            kernel cannot compute the call, or `None`. Backend and dtypes fit then, and
            sizes are known and positive.

    Raises:
        ValueError: If the caller asks for a kernel that cannot run.
    """
    own = (name for name, kernel in kernels.items() if kernel.backend == BACKEND)
    name = named or next(own, None)
    if name is None:
        return None
    reason = _obstacle(kernels[name], tensors) or obstacle(name, tensors)
    if named and reason is not None:
        raise ValueError(f"implementation={name!r} {reason}")
    return name if reason is None else None


def _obstacle(kernel, tensors):
    """The reason why a kernel cannot read the tensors, or `None`."""
    if kernel.backend != BACKEND:
        return f"needs the backend {kernel.backend!r}. Received: {BACKEND!r}"
    for x in tensors:
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype not in kernel.dtypes:
            return f"needs the dtype {' or '.join(kernel.dtypes)}. Received: {dtype}"
    shapes = [tuple(x.shape) for x in tensors]
    sizes = [size for shape in shapes for size in shape]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"needs positive sizes, known in advance. Received: shapes {shapes}"
    return None
