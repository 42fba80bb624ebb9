"""Measures activation memory and time of a training step, by depth.

    python research/measure_reversible.py --backend jax
    python research/measure_reversible.py --backend tensorflow --mode xla

Each depth is measured with a `ReversibleStack` and with the same stack made by
`reversible=False`, both of hashed attention and a feed-forward network. Memory is XLA's
reservation for the compiled step (JAX, and TensorFlow with XLA), the tensors stored for
the backward pass (PyTorch), or the growth of a separate process's resident memory in a
step, after a step on a short sequence (TensorFlow, eager and in a graph). Both stacks
are timed in turns.
"""

import os
import subprocess
import sys
import tempfile

import folders  # noqa: F401
from command_line import Parser, command, positive
from tables import show

MEBI = 2**20
KINDS = ("plain", "reversible")
SHORT = 64


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--mode", choices=("eager", "graph", "xla"), default="xla", help="TensorFlow")
    add("--depths", type=positive, nargs="+", default=[2, 6, 12, 24])
    add("--batch", type=positive, default=2)
    add("--length", type=positive, default=1024)
    parser.add_model_size(dim=128, heads=4)
    add("--repeats", type=positive, default=3, help="steps; the median counts")
    add("--memory-of", help="'DEPTH KIND': only print its bytes (TensorFlow)")
    parser.add_save()
    return parser.parse_args(argv)


def make_stack(depth, reversible, arguments):
    import keras

    from keras_efficient_attn import (
        ReformerLSHAttention,
        ReversibleBlock,
        ReversibleStack,
    )

    dim, heads = arguments.dim, arguments.heads

    def block():
        x = keras.Input((None, dim))
        h = keras.layers.LayerNormalization()(x)
        attention = ReformerLSHAttention(
            heads, dim // heads, bucket_size=32, num_buckets=16, num_hashes=2
        )
        f = keras.Model(x, attention(h, h, use_causal_mask=True))
        g = keras.Sequential(
            [
                keras.layers.LayerNormalization(),
                keras.layers.Dense(4 * dim, "relu"),
                keras.layers.Dense(dim),
            ]
        )
        return ReversibleBlock(f, g)

    stack = ReversibleStack([block() for _ in range(depth)], reversible=reversible)
    stack.build((arguments.batch, arguments.length, dim))
    return stack


def prepare(depth, kind, arguments):
    """`(memory, step)`: callables that return bytes and run a training step."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    stack = make_stack(depth, kind == "reversible", arguments)
    shape = (arguments.batch, arguments.length, arguments.dim)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    on_backend = {"jax": on_jax, "tensorflow": on_tensorflow, "torch": on_torch}
    return on_backend[keras.backend.backend()](stack, x, arguments)


def on_jax(stack, x, arguments):
    import jax
    from keras import ops

    trainable = [variable.value for variable in stack.trainable_variables]
    others = [variable.value for variable in stack.non_trainable_variables]

    def loss(trainable, x):
        y, _ = stack.stateless_call(trainable, others, x, training=True)
        return ops.sum(ops.square(y))

    compiled = jax.jit(jax.grad(loss)).lower(trainable, x).compile()
    return (
        lambda: compiled.memory_analysis().temp_size_in_bytes,
        lambda: compiled(trainable, x),
    )


def on_torch(stack, x, arguments):
    import torch

    def step():
        stack(x, training=True).square().sum().backward()

    def memory():
        weights = {variable.value.data_ptr() for variable in stack.variables}
        kept = {}

        def pack(tensor):
            if tensor.data_ptr() not in weights:
                kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = stack(x, training=True)
        y.square().sum().backward()
        return sum(kept.values())

    return memory, step


def on_tensorflow(stack, x, arguments):
    import tensorflow as tf

    from keras_efficient_attn.benchmark.memory import peak_increase, temporary_bytes

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(stack(x, training=True)))
        return tape.gradient(loss, [v.value for v in stack.trainable_variables])

    xla = arguments.mode == "xla"
    if arguments.mode != "eager":
        any_length = tf.TensorSpec((arguments.batch, None, arguments.dim))
        signature = None if xla else [any_length]
        gradients = tf.function(gradients, signature, jit_compile=xla)
    x = tf.constant(x)

    def step(x=x):
        return gradients(x)

    def memory():
        if xla:
            step()
            return temporary_bytes()
        # Exclude one-time tracing and loading, and the results, as XLA's temporaries
        # do.
        results = step(x[:, :SHORT])
        return peak_increase(step) - sum(t.shape.num_elements() * 4 for t in results)

    return memory, step


def in_a_process(depth, kind, words):
    """Bytes, measured in a separate process, with these words of the command line."""
    from keras_efficient_attn.benchmark.memory import xla_dump_flags

    command = [sys.executable, __file__, *words, "--memory-of", f"{depth} {kind}"]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={
                **os.environ,
                "XLA_FLAGS": xla_dump_flags(folder),
                # Freed memory is returned to the system at once and not counted.
                "MALLOC_MMAP_THRESHOLD_": "65536",
            },
        )
    return int(run.stdout.split()[-1])


@command(parse_arguments)
def main(arguments):
    """Measures each depth in turn, and prints the table."""
    # It imports Keras, which reads the backend once.
    import keras

    from keras_efficient_attn import benchmark

    arguments.backend = keras.backend.backend()
    if arguments.memory_of:
        depth, kind = arguments.memory_of.split()
        memory, _ = prepare(int(depth), kind, arguments)
        print(memory())
        return
    rows = []
    for depth in arguments.depths:
        memories, steps = [], {}
        for kind in KINDS:
            memory, steps[kind] = prepare(depth, kind, arguments)
            if arguments.backend == "tensorflow":
                memories.append(in_a_process(depth, kind, arguments.command[1:]))
            else:
                memories.append(memory())
        timings = benchmark.time_functions(steps, repeats=arguments.repeats)
        ratio = timings["reversible"].median / timings["plain"].median
        mebibytes = [f"{memory / MEBI:.1f}" for memory in memories]
        milliseconds = [f"{1e3 * timings[kind].median:.0f}" for kind in KINDS]
        rows.append([depth, *mebibytes, *milliseconds, f"{ratio:.2f}"])
        print(*rows[-1], flush=True)
    header = [f"{kind}, {unit}" for unit in ("MiB", "ms") for kind in KINDS]
    show(["blocks", *header, "time, reversible / plain"], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
