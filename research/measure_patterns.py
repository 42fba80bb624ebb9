"""Times sparse and local attention against softmax, causal and with the same mask.

    python research/measure_patterns.py --backend jax

Whole layers, batch 1, in turns at each length: the strided and the fixed pattern with a
stride of about the square root of the length, a window, and Keras'
`MultiHeadAttention`, once with its causal mask and once with the strided pattern as its
mask (whose time does not depend on what it masks). Training is forward and backward,
for the input and all weights.
"""

import math
import sys

import folders  # noqa: F401
from command_line import Parser, command, positive

CAUSAL, MASKED = "softmax, causal", "softmax, same mask"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    modes = ["forward", "train"]
    add("--lengths", type=positive, nargs="+", default=[2**n for n in range(10, 17)])
    add("--modes", nargs="+", choices=modes, default=modes)
    add("--heads", type=positive, default=4)
    add("--head-dim", type=positive, default=64)
    add("--window", type=positive, default=128, help="of local attention")
    add("--summary", type=positive, default=8, help="of the fixed pattern")
    add("--softmax-up-to", type=positive, default=8192, help="longest, causal")
    add("--masked-up-to", type=positive, default=4096, help="longest, same mask")
    add("--repeats", type=positive, default=3)
    return parser.parse_args(argv)


def contestants(length, arguments):
    """Dict of names to layers."""
    import keras

    from keras_efficient_attn.layers import get_attention

    stride = 2 ** round(math.log2(length) / 2)
    names = {
        "strided": f"sparse:stride={stride}",
        "fixed": f"sparse:pattern=fixed,stride={stride},summary={arguments.summary}",
        "local": f"local:window={arguments.window}",
    }
    sizes = {"num_heads": arguments.heads, "key_dim": arguments.head_dim}
    layers = {name: get_attention(option, **sizes) for name, option in names.items()}
    if length <= arguments.softmax_up_to:
        layers[CAUSAL] = keras.layers.MultiHeadAttention(**sizes)
    if length <= arguments.masked_up_to:
        # Keras' layer: this package's softmax supports no mask that differs between
        # queries.
        layers[MASKED] = keras.layers.MultiHeadAttention(**sizes)
    return layers


def measure(length, mode, arguments):
    """Median seconds by contestant."""
    import numpy as np
    from keras import ops

    from keras_efficient_attn import benchmark
    from keras_efficient_attn.benchmark.execution import make_program
    from keras_efficient_attn.ops import sparse_pattern

    shape = (1, length, arguments.heads * arguments.head_dim)
    layers = contestants(length, arguments)
    pattern = ()
    if MASKED in layers:
        mask = sparse_pattern(length, "strided", stride=layers["strided"].stride)
        pattern = (ops.convert_to_tensor(mask),)
    functions = {}
    for name, layer in layers.items():
        layer.build(shape, shape)

        def attend(x, mask=None, layer=layer):
            causal = mask is None
            return layer(x, x, attention_mask=mask, use_causal_mask=causal)

        functions[name] = make_program(attend, layer, gradients=mode == "train")

    def make_inputs(name, turn):
        random = np.random.default_rng((length, turn))
        count = 1 if mode == "forward" else 2
        draws = [
            ops.convert_to_tensor(random.standard_normal(shape, dtype="float32"))
            for _ in range(count)
        ]
        return (*draws, *(pattern if name == MASKED else ()))

    timings = benchmark.time_functions(
        functions, make_inputs=make_inputs, repeats=arguments.repeats
    )
    return {name: timing.median for name, timing in timings.items()}


@command(parse_arguments)
def main(arguments):
    """Prints the times at each length, their slopes and their crossovers."""
    from keras_efficient_attn.benchmark import crossover, log_log_slope

    print("mode | length | milliseconds of each")
    for mode in arguments.modes:
        seconds = {}
        for length in arguments.lengths:
            medians = measure(length, mode, arguments)
            for name, median in medians.items():
                seconds.setdefault(name, {})[length] = median
            row = [f"{name} {1e3 * median:.1f}" for name, median in medians.items()]
            print(" | ".join([mode, f"{length}", *row]), flush=True)
        for name in ("strided", "fixed", "local"):
            slope = log_log_slope({n: s for n, s in seconds[name].items() if n >= 4096})
            shown = "-" if slope is None else f"{slope:.2f}"
            row = [f"{mode}, {name}: slope of log time over log length {shown}"]
            for baseline in (CAUSAL, MASKED):
                if baseline in seconds:
                    from_ = crossover(seconds[baseline], seconds[name])
                    row.append(f"faster than {baseline} from {from_}")
            print("; ".join(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
