"""The kind of device that PyTorch computes on, where Keras puts tensors."""

import torch


def device_kind():
    accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()
    return "gpu" if accelerated else "cpu"
