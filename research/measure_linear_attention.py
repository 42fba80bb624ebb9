"""Times causal linear attention against the machine's matmul peak and softmax.

    python research/measure_linear_attention.py --backend jax

The operation alone, without a layer's projections: 8 heads of size 64, feature map
elu + 1, batch 1, beside Keras' softmax attention on inputs of the same size, in turns.
Useful operations of the forward pass, per position and head: 4·64·64 for the states and
4·64·64 inside chunks; three times that with the backward pass.
"""

import argparse
import os

HEADS, HEAD_DIM = 8, 64
PEAK_SIZE = 2048


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=["tensorflow", "jax", "torch"], default="jax")
    add("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 16)])
    add("--repeats", type=int, default=7)
    add("--softmax-up-to", type=int, default=8192, help="longest length for softmax")
    return parser.parse_args()


def linear(query, key, value):
    from keras import ops

    from keras_efficient_attn.ops.common.feature_kernels.choice import (
        LinearAttentionConfig,
    )
    from keras_efficient_attn.ops.linear_attention.api import (
        linear_attention_with_feature_maps,
    )
    from keras_efficient_attn.ops.linear_attention.feature_maps import elu_features

    config = LinearAttentionConfig(elu_features, elu_features, HEAD_DIM, causal=True)
    (output,), _ = linear_attention_with_feature_maps((query, key, value), config)
    return ops.cast(output, query.dtype)


def softmax(query, key, value):
    from keras import ops

    return ops.dot_product_attention(query, key, value, is_causal=True)


def measure(length, repeats, with_softmax):
    """`Timing` by `(contestant, mode, dtype)` at one length, the matmul among them."""
    import numpy as np
    from keras import ops

    from keras_efficient_attn import benchmark

    contestants = [(linear, "float32"), (linear, "bfloat16")]
    contestants += [(softmax, "float32")] if with_softmax else []
    functions = {("matmul", "", "float32"): benchmark.compile_function(ops.matmul)}
    for function, dtype in contestants:
        for mode in ("forward", "train"):
            compiled = benchmark.compile_function(function, gradients=mode == "train")
            functions[function.__name__, mode, dtype] = compiled

    def make_inputs(key, turn):
        name, mode, dtype = key
        shape = (1, length, HEADS, HEAD_DIM)
        shape = (PEAK_SIZE, PEAK_SIZE) if name == "matmul" else shape
        count = {"": 2, "forward": 3, "train": 4}[mode]
        rng = np.random.default_rng((length, turn))
        draws = [rng.standard_normal(shape, dtype="float32") for _ in range(count)]
        return tuple(ops.cast(draw, dtype) for draw in draws)

    return benchmark.time_functions(functions, make_inputs=make_inputs, repeats=repeats)


def main():
    arguments = parse_arguments()
    os.environ["KERAS_BACKEND"] = arguments.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras_efficient_attn.benchmark import log_log_slope

    print(f"{arguments.backend}: mode | length | ms | of peak | softmax | bfloat16")
    seconds = {"forward": {}, "train": {}}
    for length in arguments.lengths:
        with_softmax = length <= arguments.softmax_up_to
        timings = measure(length, arguments.repeats, with_softmax)
        times = {key: timing.median for key, timing in timings.items()}
        peak = 2 * PEAK_SIZE**3 / times["matmul", "", "float32"]
        for mode, passes in (("forward", 1), ("train", 3)):
            own = seconds[mode][length] = times["linear", mode, "float32"]
            share = passes * length * HEADS * 8 * HEAD_DIM**2 / own / peak
            row = [mode, f"{length}", f"{1e3 * own:.1f}", f"{share:.1%}"]
            baseline = times.get(("softmax", mode, "float32"))
            row.append(f"{baseline / own:.2f} x" if with_softmax else "-")
            row.append(f"{times['linear', mode, 'bfloat16'] / own:.2f} x")
            print(" | ".join(row), flush=True)
    for mode, series in seconds.items():
        slope = log_log_slope({n: y for n, y in series.items() if n >= 4096})
        if slope is not None:
            print(f"{mode}: slope of log time over log length from 4096: {slope:.2f}")


if __name__ == "__main__":
    main()
