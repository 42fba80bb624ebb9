"""Softmax over intervals of the keys, by the kernels of JAX and PyTorch."""
