"""The kernel on TensorFlow, which XLA fuses."""

from keras_efficient_attn.ops.fourier.kernel import Kernel
from keras_efficient_attn.ops.fourier.kernels import sines

KERNEL = FUSED = Kernel(sines.prepare, sines.log_kernel, sines.log_kernel_gradient)
