"""One long sequence, forward and backward, over virtual devices of JAX.

    KERAS_BACKEND=jax python -m tests.long_runs.split_sequence --positions 1048576

Prints, for each attention and length, the peak of memory of a process that has all
devices, the time of a step with its compilation, and the bytes of the collectives in
the program.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from tables import show  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[2**16, 2**20])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["linear:feature_map=elu", "gated-delta", "local:window=512"],
    )
    parser.add_argument("--dim", type=int, default=32, help="of the one head, too")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the table, as JSON")
    arguments = parser.parse_args()
    arguments.command = ["-m", "tests.long_runs.split_sequence", *sys.argv[1:]]
    rows = []
    # A peak is that of a process, and JAX counts its devices when it starts.
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as process:
        for attention in arguments.attention:
            for positions in arguments.positions:
                sizes = positions, arguments.devices, arguments.dim
                row = process.submit(measure, attention, *sizes).result()
                rows.append([attention, f"{positions:,}", *row])
                print(*rows[-1], flush=True)
    header = ["attention", "positions", "peak, GiB", "seconds, with compilation"]
    show([*header, "bytes sent"], rows, arguments)


def measure(attention, positions, devices, dim):
    """The cells of a row: memory, time and collectives of a step."""
    # Read when JAX starts.
    os.environ.update(JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu")
    import jax
    import keras
    import numpy as np

    from keras_efficient_attn.distribution import SequenceParallel
    from keras_efficient_attn.layers import get_attention
    from tests.distribution.virtual_devices.programs import sent_bytes

    shape, axes = (1, devices), ("batch", "sequence")
    mesh = keras.distribution.DeviceMesh(shape, axes)
    layer = get_attention(attention, num_heads=1, key_dim=dim)
    sizes = (1, positions, dim)
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
    _, gradients = jax.block_until_ready(compiled(weights, x))
    seconds = time.perf_counter() - start
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [f"{peak:.2f}", f"{seconds:.0f}", f"{sent_bytes(compiled):,}"]


if __name__ == "__main__":
    main()
