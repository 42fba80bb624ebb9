"""Errors of `SequenceParallel` without devices to split over."""

import keras
import pytest

from keras_efficient_attn.distribution import SequenceParallel


def test_without_devices_it_says_what_is_missing():
    error, message = {
        "jax": (TypeError, "`device_mesh` must be"),
        "tensorflow": (ValueError, "backend 'jax' or 'torch'"),
        "torch": (ValueError, "no process group"),
    }[keras.backend.backend()]
    with pytest.raises(error, match=message):
        SequenceParallel()
