"""The kernel on JAX, which XLA fuses, with its derivatives of any order."""

import jax
from keras import ops

from keras_efficient_attn.ops.common.numerics import cosine, sine
from keras_efficient_attn.ops.fourier.kernel import Kernel
from keras_efficient_attn.ops.fourier.kernels import sines


def prepare(angles):
    # Second derivatives need those of the sines.
    return angles, sine(angles), cosine(angles)


# JAX would derive the product of the factors, and divide by each again.
log_kernel = jax.custom_vjp(sines.log_kernel)


def _forward(query, keys):
    return sines.log_kernel(query, keys), (query, keys)


def _backward(saved, grad_logs):
    query, keys = saved
    gradients = sines.log_kernel_gradient(query, keys, grad_logs)
    # That of the angles is the whole one, the sines' and cosines' included.
    zeros = (map(ops.zeros_like, side[1:]) for side in (query, keys))
    return tuple((first, *rest) for first, rest in zip(gradients, zeros, strict=True))


log_kernel.defvjp(_forward, _backward)

# The automatic gradient compiles to the same program as one by hand.
KERNEL = FUSED = Kernel(prepare, log_kernel, None)
