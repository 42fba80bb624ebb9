"""Sequences on a device that is not the CPU: PyTorch's meta device, without numbers."""

import contextlib

import keras
import pytest

from tests.distribution.sequence_cases import CASES, make_inputs

if keras.backend.backend() != "torch":
    pytest.skip("PyTorch's devices", allow_module_level=True)

import torch

from keras_efficient_attn.distribution import SequenceParallel
from keras_efficient_attn.distribution.devices.torch import Devices, Runner


class TwoDevices(Devices):
    """The second of two processes, which receives what it sends."""

    def __init__(self):
        self.group, self.size, self.rank = None, 2, 1

    def all_gather(self, x):
        return torch.stack([x, x])

    def shift(self, x, step):
        return x


def make_split():
    split, runner = object.__new__(SequenceParallel), object.__new__(Runner)
    runner.devices, runner.size, runner.divides_tensors = TwoDevices(), 2, False
    split._runner = runner
    return split


# Keras' `full_like` reads a number, which decays and delta rules need.
RATES = "decay", "decay by feature", "gated delta"


@pytest.mark.parametrize("name", [name for name in CASES if name not in RATES])
def test_operations_make_their_tensors_where_the_inputs_are(name, monkeypatch):
    # The meta device has no autocast, which is off here anyway.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    with keras.device("meta"):
        inputs = {
            key: torch.from_numpy(x).to("meta") for key, x in make_inputs(24).items()
        }
        output = CASES[name](make_split(), inputs, False)
    assert output.device.type == "meta"
    assert output.shape == inputs["value"].shape


def test_which_devices_are_before_is_where_the_tensor_is():
    assert TwoDevices().before(torch.empty(1, device="meta")).device.type == "meta"
    assert TwoDevices().before(torch.empty(1)).tolist() == [True, False]
