"""Block and chunk sizes for each kind of device, and programs compiled for it.

On a CPU, sequential steps whose tensors fit in the cache are fast. On a GPU or a TPU,
few large steps are fast: all chunks in parallel, as long as their tensors fit in
memory.
"""

import contextlib
import dataclasses
import functools
import inspect

import keras

from keras_efficient_attn.ops.common.backend import (
    BACKEND,
    in_function_transform,
    is_traced_by_torch,
    pick,
)
from keras_efficient_attn.ops.common.checks import check_name
from keras_efficient_attn.ops.common.symbolic import FUNCTIONS, call_symbolically

if BACKEND == "torch":
    import torch

    # Determined once, as in Keras: `torch.compile` cannot trace the check.
    _HAS_GPU = torch.cuda.is_available() or torch.backends.mps.is_available()


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes that change the speed and the memory of an operation, not its result.

    The defaults are for a CPU.

    Attributes:
        step_floats: Floats in the tensors of one step of a scan.
        max_chunks: Maximum number of chunks per step.
        chunk_size: Positions per chunk of linear attention.
        block: Minimum number of queries per block of softmax attention.
        code_block: Positions per block of attention to codes.
        largest_code_block: Positions per block of attention to many codes.
        expanded_code_block: Positions per block with `order=2`.
        expanded_code_pairs: With `order=2`, the length up to which pairs of queries and
            keys take less time than sums of features.
        quantize_chunk: Positions per step of the nearest-code search.
        fourier_tile: Minimum number of queries per tile of exact Fourier attention.
        found_floats: Floats of the keys gathered in one step of streamed LSH attention.
        lsh_pairs: LSH attention computes all pairs of positions if they are at most
            this many times the pairs within sorted chunks.
        lsh_block_floats: Pairs in one block of them.
        lsh_steps: Factor by which steps of LSH attention are larger than others.
        sequential_blocks: Whether each step of attention to codes has one block, so
            that the sums before the blocks are computed sequentially.
        sum_codes_by_index: Whether rows of many features are added to the sums of
            their codes by index, not by a product with a one-hot matrix.
    """

    # PyTorch runs operations one by one, each with an overhead.
    step_floats: int = pick(2**20, torch=2**22)
    max_chunks: int = 16
    chunk_size: int = 64
    block: int = 64
    code_block: int = 128
    largest_code_block: int = pick(256, torch=128)
    expanded_code_block: int = pick(128, torch=256)
    expanded_code_pairs: int = 512
    quantize_chunk: int = 128
    fourier_tile: int = 4
    found_floats: int = 2**21
    lsh_pairs: int = pick(2, tensorflow=3)
    lsh_block_floats: int = 2**24
    lsh_steps: float = 1
    # The fastest of the two, forward and in training, on each backend.
    sequential_blocks: bool = pick(False, tensorflow=True)
    sum_codes_by_index: bool = True


_CPU = BlockSizes()
# Chosen by the compiler's estimates.
_TPU = BlockSizes(
    step_floats=2**26,
    max_chunks=256,
    chunk_size=256,
    block=256,
    code_block=256,
    largest_code_block=256,
    expanded_code_block=512,
    quantize_chunk=1024,
    fourier_tile=8,
    found_floats=2**24,
    lsh_pairs=12,
    lsh_block_floats=2**26,
    lsh_steps=0.5,
    sequential_blocks=False,
    sum_codes_by_index=False,
)
# Not measured on hardware yet.
_GPU = dataclasses.replace(_TPU, chunk_size=128, block=128)
# `torch.compile` unrolls every step, which costs compile time.
_UNROLLED = dataclasses.replace(_CPU, step_floats=2**24, max_chunks=64, lsh_steps=4)
BLOCK_SIZES = {"cpu": _CPU, "gpu": _GPU, "tpu": _TPU}

_named = []


def device_kind():
    """`"cpu"`, `"gpu"` or `"tpu"`: where the backend computes by default.

    Another kind of accelerator counts as a GPU.
    """
    if _named:
        return _named[-1]
    if BACKEND == "torch":
        return "gpu" if _HAS_GPU else "cpu"
    if BACKEND == "jax":
        import jax

        kind = jax.default_backend()
        return kind if kind in BLOCK_SIZES else "gpu"
    import tensorflow as tf

    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return next((kind for kind in ("TPU", "GPU") if kind in kinds), "CPU").lower()


def has_tpu_kernels():
    """Whether JAX plans for one TPU, or for those of a `keras.distribution`.

    Otherwise XLA would have to divide a kernel, which it cannot.
    """
    if BACKEND != "jax" or device_kind() != "tpu":
        return False
    import jax

    return jax.device_count() == 1 or keras.distribution.distribution() is not None


def has_kernels(query):
    """Whether a tensor's device has kernels: a TPU, or CUDA with PyTorch."""
    if BACKEND == "torch":
        return query.is_cuda and not in_function_transform()
    return has_tpu_kernels()


def block_sizes():
    """The `BlockSizes` of the device that computes."""
    kind = device_kind()
    return _UNROLLED if kind == "cpu" and is_traced_by_torch() else BLOCK_SIZES[kind]


@contextlib.contextmanager
def plan_for(kind):
    """Context that plans operations for a device that need not be present.

    A program traced inside, for example for export, has that device's plan.

    Args:
        kind: `"cpu"`, `"gpu"` or `"tpu"`.

    Raises:
        ValueError: For another kind.

    Example:

    >>> from keras_efficient_attn.ops.common.plan import device_kind, plan_for
    >>> with plan_for("tpu"):
    ...     device_kind()
    'tpu'
    """
    check_name("kind", kind, BLOCK_SIZES)
    _named.append(kind)
    try:
        yield
    finally:
        _named.pop()


def jit_on_jax(*static_arguments):
    """Decorator: on JAX, compiles the function once per value of the arguments named.

    On other backends the function is called directly: TensorFlow compiles whole models,
    and PyTorch would compile for half a minute for little gain.
    """

    def decorate(function):
        if BACKEND != "jax":
            return function
        import jax

        @functools.lru_cache(16)
        def jit(device_kind, distribution):
            # One object per plan: JAX caches compiled functions by object.
            own = functools.wraps(function)(functools.partial(function))
            return jax.jit(own, static_argnames=static_arguments)

        @functools.wraps(function)
        def call(*args, **kwargs):
            distribution = keras.distribution.distribution()
            return jit(device_kind(), distribution)(*args, **kwargs)

        return call

    return decorate


def symbolic(function):
    """Decorator: on a `keras.KerasTensor` the function is a `keras.Operation`."""
    FUNCTIONS[function.__name__] = function

    @functools.wraps(function)
    def call(*args, **kwargs):
        for x in (*args, *kwargs.values()):
            nested = x.values() if isinstance(x, dict) else (x,)
            if any(isinstance(tensor, keras.KerasTensor) for tensor in nested):
                return call_symbolically(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def opaque_on_torch(function):
    """Decorator: for `torch.compile`, the function is one operation.

    It may read values, and its loops are not unrolled. It has no gradient.

    Args:
        function: Function of tensors; its result has the first tensor's shape and
            dtype.
    """
    if BACKEND != "torch":
        return function
    import torch

    names = inspect.signature(function).parameters
    arguments = ", ".join(f"Tensor {name}" for name in names)
    operation = torch.library.custom_op(
        f"keras_efficient_attn::{function.__name__}",
        # A result may not be an argument itself.
        lambda *tensors: function(*tensors).clone(),
        mutates_args=(),
        schema=f"({arguments}) -> Tensor",
    )
    operation.register_fake(lambda first, *_: torch.empty_like(first))

    @functools.wraps(function)
    def call(*tensors):
        return (operation if is_traced_by_torch() else function)(*tensors)

    return call


def compile_on_torch(function):
    """Decorator: on PyTorch, compiles the function by `torch.compile`.

    Elsewhere, and if PyTorch compiles the caller, the function is unchanged. The first
    call, and the first with other shapes, includes the compile time.
    """

    @functools.cache
    def compile_once():
        import torch

        return torch.compile(function)

    @functools.wraps(function)
    def call(*args):
        if BACKEND == "torch" and not is_traced_by_torch():
            return compile_once()(*args)
        return function(*args)

    return call
