"""Kernels of linear attention, for accelerators; imported on first use."""
