"""A script: MirroredStrategy over two virtual devices of TensorFlow, against one."""

import keras
import numpy as np
import tensorflow as tf

from tests.distribution.training import (
    MODELS,
    REVIVED,
    check_revived,
    check_same,
    codes_of,
    fit,
    make_batches,
    make_model,
    train,
    weights_of,
)


def check_replicas_agree(strategy, model):
    """Each device has the same values of all variables."""
    for variable in model.variables:
        first, second = strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first.numpy(), second.numpy(), variable.path)


def check_revivals(strategy):
    # Codes come from the keys of the first replica, so not those of one device.
    with strategy.scope():
        model = make_model(REVIVED)
        fit(model, make_batches())
    check_replicas_agree(strategy, model)
    return codes_of(weights_of(model))


def main():
    # In float32, rounding errors grow beyond the tolerance within five steps.
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    expected = {name: train(name) for name in MODELS}
    # Only one: TensorFlow numbers the transfers of each from 1 on.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    for name in MODELS:
        with strategy.scope():
            received = train(name)
        check_same(received, expected[name])
        print(f"{name}: as on one device", flush=True)
    check_revived(check_revivals(strategy), make_batches())


if __name__ == "__main__":
    main()
