"""The kernels on PyTorch: one run operation by operation, one compiled.

Compiled, a step of training takes 0.15 of the time (FourierAttention, 4 heads of 32,
1,024 positions: 226 and 1,523 ms, by the benchmark command with `--layers fourier
fourier:implementation=fused`).
"""

from keras import ops

from keras_efficient_attn.ops.common.numerics import cosine, sine
from keras_efficient_attn.ops.common.plan import compile_on_torch
from keras_efficient_attn.ops.fourier.kernel import Kernel
from keras_efficient_attn.ops.fourier.kernels import sines, torch_eager

# Keys per block of the compiled kernel; its pairs then stay in the cache.
BLOCK = 512

_log_kernel = compile_on_torch(sines.log_kernel)
_log_kernel_gradient = compile_on_torch(sines.log_kernel_gradient)


def prepare(angles):
    # Otherwise the compiler would keep the axis order and read with strides.
    return sines.prepare(angles.contiguous())


def log_kernel(query, keys):
    blocks = [_log_kernel(query, block) for block in _blocks(keys)]
    return ops.concatenate(blocks, axis=-1)


def log_kernel_gradient(query, keys, grad_logs):
    pairs = zip(_blocks(keys), _blocks((grad_logs,)), strict=True)
    gradients = [
        _log_kernel_gradient(query, block, grad_block) for block, (grad_block,) in pairs
    ]
    grad_query, grad_key = zip(*gradients, strict=True)
    return sum(grad_query), ops.concatenate(grad_key, axis=-1)


def _blocks(tensors):
    """The tensors, cut along their last axis into blocks that stay in the cache."""
    return list(zip(*(t.split(BLOCK, dim=-1) for t in tensors), strict=True))


KERNEL = Kernel(
    torch_eager.prepare, torch_eager.log_kernel, torch_eager.log_kernel_gradient
)
FUSED = Kernel(prepare, log_kernel, log_kernel_gradient)


def _prepare_for_autograd(angles):
    return angles, sine(angles), cosine(angles)


# Without a handwritten derivative.
PLAIN = Kernel(_prepare_for_autograd, sines.log_kernel, None)
