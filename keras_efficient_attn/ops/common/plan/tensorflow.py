"""The kind of device that TensorFlow computes on."""

import tensorflow as tf


def device_kind():
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return next((kind for kind in ("TPU", "GPU") if kind in kinds), "CPU").lower()
