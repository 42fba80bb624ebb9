"""The kernel on JAX, which XLA fuses, with its derivatives of any order."""

import jax
from keras import ops

from keras_efficient_attn.ops.common.numerics import cosine, sine
from keras_efficient_attn.ops.fourier.kernel import Kernel
from keras_efficient_attn.ops.fourier.kernels import sines


def prepare(angles):
    # Second derivatives need those of the sines.
    return angles, sine(angles), cosine(angles)


# JAX would differentiate the product of the factors and divide by each.
log_kernel = jax.custom_vjp(sines.log_kernel)


def _forward(query, keys):
    return sines.log_kernel(query, keys), (query, keys)


def _backward(saved, grad_logs):
    query, keys = saved
    gradients = sines.log_kernel_gradient(query, keys, grad_logs)
    # The angles' gradient is complete; it includes that of sines and cosines.
    zeros = (map(ops.zeros_like, side[1:]) for side in (query, keys))
    return tuple((first, *rest) for first, rest in zip(gradients, zeros, strict=True))


log_kernel.defvjp(_forward, _backward)

# The automatic gradient compiles to the same program as a handwritten one.
KERNEL = FUSED = Kernel(prepare, log_kernel, None)
