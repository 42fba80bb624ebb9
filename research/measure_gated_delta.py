"""Times the gated delta rule against elu's linear attention, and KerasHub's rule.

    python research/measure_gated_delta.py --backend jax
    python research/measure_gated_delta.py --lengths 2048 --heads 4 --kerashub

The operations alone, forward with backward, batch 1, float32, in turns: log decays
between -0.1 and 0 by head, beta between 0 and 1, keys of norm 1. "First call" counts
compilation. `--kerashub` adds the rule of KerasHub's Qwen 3.5, which takes minutes to
compile at lengths beyond 2,048.
"""

import argparse
import functools
import os


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", choices=["tensorflow", "jax", "torch"], default="jax")
    add("--lengths", type=int, nargs="+", default=[2**n for n in range(12, 17)])
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--repeats", type=int, default=5)
    add("--kerashub", action="store_true", help="the rule of its Qwen 3.5, too")
    return parser.parse_args()


def elu(query, key, value):
    import keras

    from keras_efficient_attn import ops

    features = keras.ops.elu(query) + 1, keras.ops.elu(key) + 1
    return ops.linear_attention(*features, value, causal=True)


def gated_delta(query, key, value, log_decay, beta):
    from keras_efficient_attn import ops

    return ops.linear_attention(
        query,
        key,
        value,
        log_decay=log_decay,
        beta=beta,
        causal=True,
        normalize=False,
    )


def kerashub_rule():
    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as qwen

    def kerashub(query, key, value, log_decay, beta):
        return qwen._chunk_gated_delta_rule(query, key, value, log_decay, beta)[0]

    return kerashub


def draw_inputs(arguments, length, name, turn):
    """An upstream gradient, and the inputs of a contestant."""
    import numpy as np
    from keras import ops

    random = np.random.default_rng((length, turn))
    shape = (1, length, arguments.heads, arguments.head_dim)
    gradient, query, key, value = random.standard_normal((4, *shape), "float32")
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    query /= np.linalg.norm(query, axis=-1, keepdims=True)
    log_decay, beta = random.random((2, *shape[:-1]), "float32")
    inputs = gradient, query, key, value
    if name != "elu":
        inputs += -0.1 * log_decay, beta
    return tuple(ops.convert_to_tensor(x) for x in inputs)


def main():
    arguments = parse_arguments()
    os.environ["KERAS_BACKEND"] = arguments.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras_efficient_attn import benchmark

    contestants = [elu, gated_delta]
    if arguments.kerashub:
        contestants.append(kerashub_rule())
    seconds = {f.__name__: {} for f in contestants}
    print(f"{arguments.backend}: rule | length | ms | of elu's time | first call, s")
    for length in arguments.lengths:
        timings = benchmark.time_functions(
            {
                f.__name__: benchmark.compile_function(f, gradients=True)
                for f in contestants
            },
            make_inputs=functools.partial(draw_inputs, arguments, length),
            repeats=arguments.repeats,
        )
        for name, timing in timings.items():
            seconds[name][length] = timing.median
            ratio = timing.median / timings["elu"].median
            row = [name, f"{length}", f"{1e3 * timing.median:.1f}", f"{ratio:.2f}"]
            print(" | ".join([*row, f"{timing.first:.1f}"]), flush=True)
    for name, series in seconds.items():
        slope = benchmark.log_log_slope(series)
        if slope is not None:
            print(f"{name}: slope of log time over log length: {slope:.2f}")


if __name__ == "__main__":
    main()
