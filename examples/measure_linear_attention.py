"""Times causal linear attention against the machine's matmul peak and softmax.

    python examples/measure_linear_attention.py --backend jax

Attention over 8 heads of size 64, feature map elu + 1, batch 1, and Keras' own
softmax attention on the same tensors. Contestants take turns; every figure is a
median over the rounds, and shares and ratios are within the run.

Useful operations of the forward pass, per position and head: 4·64·64 for the states
and 4·64·64 inside chunks; three times that with the backward pass.
"""

import argparse
import os
import time

HEADS, HEAD_DIM = 8, 64
PEAK_SIZE = 2048


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--backend", choices=["tensorflow", "jax", "torch"], default="jax"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--softmax-up-to", type=int, default=8192, help="longest length for softmax"
    )
    return parser.parse_args()


def compiled(function):
    """The backend's usual way to run a function: XLA, a graph, or eagerly."""
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        jitted = jax.jit(function)
        return lambda *tensors: jax.block_until_ready(jitted(*tensors))
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def with_gradients(function):
    """`function` and the gradients of all its arguments for a given cotangent."""
    import keras

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        def both(cotangent, *tensors):
            output, pull = jax.vjp(function, *tensors)
            return output, pull(cotangent)

    elif backend == "tensorflow":
        import tensorflow as tf

        def both(cotangent, *tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                output = function(*tensors)
            return output, tape.gradient(output, tensors, cotangent)

    else:
        import torch

        def both(cotangent, *tensors):
            tensors = [t.detach().requires_grad_(True) for t in tensors]
            output = function(*tensors)
            return output, torch.autograd.grad(output, tensors, cotangent)

    return both


def linear(query, key, value):
    from keras import ops

    from keras_efficient_attn.ops.feature_maps import elu_features
    from keras_efficient_attn.ops.linear_attention import mapped_linear_attention

    (output,), _ = mapped_linear_attention(
        query,
        key,
        value,
        query_map=elu_features,
        key_map=elu_features,
        num_features=HEAD_DIM,
        causal=True,
    )
    return ops.cast(output, query.dtype)


def softmax(query, key, value):
    from keras import ops

    return ops.dot_product_attention(query, key, value, is_causal=True)


def medians(contestants, rounds):
    """Median seconds of each callable, taking turns after one round of warming up."""
    import numpy as np

    times = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def measure(length, rounds, with_softmax):
    """Seconds by contestant at one length, the matmul among them."""
    import numpy as np
    from keras import ops

    random = np.random.default_rng(0)

    def draw(*shape, dtype="float32"):
        return ops.cast(random.normal(size=shape).astype("float32"), dtype)

    square = draw(PEAK_SIZE, PEAK_SIZE)
    product = compiled(lambda x: x @ x)
    contestants = {"matmul": lambda: product(square)}
    shape = (1, length, HEADS, HEAD_DIM)
    for dtype in ("float32", "bfloat16"):
        tensors = [draw(*shape, dtype=dtype) for _ in range(3)]
        cotangent = draw(*shape, dtype=dtype)
        for name, function in (("linear", linear), ("softmax", softmax)):
            if name == "softmax" and (not with_softmax or dtype != "float32"):
                continue
            forward, both = compiled(function), compiled(with_gradients(function))
            contestants[f"{name} forward {dtype}"] = lambda f=forward, t=tensors: f(*t)
            contestants[f"{name} train {dtype}"] = (
                lambda f=both, c=cotangent, t=tensors: f(c, *t)
            )
    return medians(contestants, rounds)


def main():
    arguments = parse_arguments()
    os.environ["KERAS_BACKEND"] = arguments.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np

    columns = (
        "mode",
        "length",
        "ms",
        "of peak",
        "softmax / linear",
        "bfloat16 / float32",
    )
    print(f"{arguments.backend}: " + " | ".join(columns))
    seconds = {"forward": [], "train": []}
    for length in arguments.lengths:
        with_softmax = length <= arguments.softmax_up_to
        times = measure(length, arguments.rounds, with_softmax)
        peak = 2 * PEAK_SIZE**3 / times["matmul"]
        for mode, passes in (("forward", 1), ("train", 3)):
            own = times[f"linear {mode} float32"]
            useful = passes * length * HEADS * 8 * 64 * HEAD_DIM
            row = [mode, f"{length}", f"{1e3 * own:.1f}", f"{useful / own / peak:.1%}"]
            ratio = times.get(f"softmax {mode} float32", np.nan) / own
            row.append(f"{ratio:.2f}" if with_softmax else "-")
            row.append(f"{times[f'linear {mode} bfloat16'] / own:.2f}")
            print(" | ".join(row), flush=True)
            if length >= 4096:
                seconds[mode].append((np.log(length), np.log(own)))
    for mode, points in seconds.items():
        if len(points) > 1:
            slope = np.polyfit(*np.transpose(points), 1)[0]
            print(f"{mode}: slope of log time over log length from 4096: {slope:.2f}")


if __name__ == "__main__":
    main()
