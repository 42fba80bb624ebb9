"""The kind of device that PyTorch computes on, where Keras puts tensors."""

import torch

# Determined once, as in Keras: `torch.compile` cannot trace the check.
_ACCELERATED = torch.cuda.is_available() or torch.backends.mps.is_available()


def device_kind():
    return "gpu" if _ACCELERATED else "cpu"
