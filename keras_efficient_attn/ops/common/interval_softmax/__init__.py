"""Softmax over intervals of the keys, by the kernels that JAX and PyTorch bring."""
