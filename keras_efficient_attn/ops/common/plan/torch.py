"""The kind of device that PyTorch computes on, where Keras puts tensors."""

import torch

# Asked once, as Keras does: `torch.compile` cannot trace the question.
_ACCELERATED = torch.cuda.is_available() or torch.backends.mps.is_available()


def device_kind():
    return "gpu" if _ACCELERATED else "cpu"
