"""A script: MirroredStrategy over two virtual devices of TensorFlow, against one."""

import numpy as np
import tensorflow as tf

from tests.distribution.training import (
    ATTENTION,
    check_same,
    fit,
    make_model,
    weights_of,
)

# Without its loss: if replicas wait for each other in the forward pass, Keras gives
# each replica the `add_loss` losses of all replicas so far.
CODES, *OTHERS = ATTENTION
LAYERS = [f"{CODES},commitment_weight=0.0", *OTHERS]


def main():
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    model = make_model(LAYERS)
    expected, expected_weights = fit(model), weights_of(model)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        model = make_model(LAYERS)
        losses = fit(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    check_same(weights_of(model), expected_weights)


if __name__ == "__main__":
    main()
