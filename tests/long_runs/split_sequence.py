"""One long sequence, forward and backward, over virtual devices of JAX.

    KERAS_BACKEND=jax python -m tests.long_runs.split_sequence --positions 1048576

Prints the time of a step with its compilation, the peak of memory of the process, which
has all devices, and the bytes of the collectives in the program.
"""

import argparse
import os
import resource
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=2**20)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--attention", default="linear:feature_map=elu")
    parser.add_argument("--dim", type=int, default=32, help="of the one head, too")
    arguments = parser.parse_args()
    # Read when JAX starts.
    os.environ.update(JAX_NUM_CPU_DEVICES=str(arguments.devices), JAX_PLATFORMS="cpu")
    import jax
    import keras
    import numpy as np

    from keras_efficient_attn.distribution import SequenceParallel
    from keras_efficient_attn.layers import get_attention
    from tests.distribution.virtual_devices.programs import count, sent_bytes

    shape, axes = (1, arguments.devices), ("batch", "sequence")
    mesh = keras.distribution.DeviceMesh(shape, axes)
    layer = get_attention(arguments.attention, num_heads=1, key_dim=arguments.dim)
    sizes = (1, arguments.positions, arguments.dim)
    layer.build(sizes, sizes)
    weights = [variable.value for variable in layer.trainable_variables]
    frozen = [variable.value for variable in layer.non_trainable_variables]
    x = np.random.default_rng(0).normal(size=sizes).astype("float32")
    # Each device gets its positions and no others.
    spec = jax.sharding.PartitionSpec(None, "sequence")
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh.backend_mesh, spec))

    def loss(weights, x):
        output, _ = layer.stateless_call(weights, frozen, x, x, use_causal_mask=True)
        return jax.numpy.mean(jax.numpy.square(output))

    start = time.perf_counter()
    with SequenceParallel(mesh).scope():
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        compiled = step.lower(weights, x).compile()
    value, gradients = jax.block_until_ready(compiled(weights, x))
    seconds = time.perf_counter() - start
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{arguments.attention}, {arguments.positions:,} positions over "
        f"{arguments.devices} devices: loss {float(value):.6f}, {seconds:.0f} s, peak "
        f"{peak:.2f} GiB, {count(compiled)}, {sent_bytes(compiled):,} bytes sent"
    )


if __name__ == "__main__":
    main()
