"""A script: updating codes on two replicas equals one update with all keys.

The number of devices must be set before a backend starts, so this needs a separate
process.
"""

import keras
import numpy as np

from keras_efficient_attn import VQAttention
from tests.autodiff import to_numpy

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(4, 6, 4)).astype("float32")


def built():
    keras.utils.set_random_seed(0)
    layer = VQAttention(
        2, 4, num_codes=3, window=2, block_length=4, seed=1, codes={"init": "random"}
    )
    layer.build(X.shape, X.shape)
    return layer


def statistics(layer):
    names = ("sum", "count", "usage", "error")
    weights = {w.name: to_numpy(w) for w in layer._codebook.weights}
    return {name: weights[name] for name in names}


def by_one_device():
    layer = built()
    before = statistics(layer)
    layer(X, X, training=True)
    after = statistics(layer)
    assert all(np.abs(after[name] - before[name]).max() > 1e-3 for name in after)
    return after


def check(layer, expected):
    for name, value in statistics(layer).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def on_tensorflow():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    expected = by_one_device()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        layer = built()
    half = strategy.experimental_distribute_values_from_function(
        lambda context: X[context.replica_id_in_sync_group :: 2]
    )
    step = tf.function(lambda x: layer(x, x, training=True))
    tf.function(lambda: strategy.run(step, (half,)))()
    check(layer, expected)


def on_jax():
    expected = by_one_device()
    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == 2
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    layer, sequence = built(), keras.Input(X.shape[1:])
    model = keras.Model(sequence, layer(sequence, sequence))
    model.compile("sgd", "mse")
    model.train_on_batch(X, X)
    check(layer, expected)


def on_torch():
    import torch
    import torch.distributed as distributed
    import torch.multiprocessing as multiprocessing

    # A process that has used CUDA cannot be forked.
    method = "spawn" if torch.cuda.is_available() else "fork"
    store = distributed.TCPStore(
        "localhost", 0, 2, is_master=True, wait_for_workers=False
    )
    multiprocessing.start_processes(
        run_on_torch, (store.port,), nprocs=2, start_method=method
    )


def run_on_torch(rank, port):
    import torch.distributed as distributed

    expected = by_one_device()
    store = distributed.TCPStore("localhost", port, 2, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layer = built()
    layer(X[rank::2], X[rank::2], training=True)
    check(layer, expected)
    distributed.destroy_process_group()


if __name__ == "__main__":
    {"tensorflow": on_tensorflow, "jax": on_jax, "torch": on_torch}[BACKEND]()
