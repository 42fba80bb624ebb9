"""Tests byte models on contexts that are longer than those of their training.

    python research/claim_length.py --backend jax

Causal models are trained on rows of `--length` bytes, and tested on windows of that
length and of longer ones. The last bytes of a window count, half as many as a row of
training has. They are the same bytes for all lengths, so that only what stands before
them differs. Short convolutions give the order of the bytes to layers without
positions. The table has bits per byte, the mean and the standard deviation over the
seeds.
"""

import sys

import folders  # noqa: F401
from claims.arguments import add_bytes, parse
from command_line import Parser, command, positive
from tables import mean_and_spread, show

ATTENTION = [
    "softmax:rotary_wavelength=10000",
    "softmax",
    "linear:feature_map=elu",
    "performer:feature_map=favor+,num_features=64,qk_norm=True",
    "vq:num_codes=64,window=64,relative_positions=True",
    "local:window=64,rotary_wavelength=10000",
    "xl",
]


def parse_arguments(argv):
    parser = Parser(__doc__)
    parser.add_attention(ATTENTION)
    add_bytes(parser, length=256)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=positive,
        default=[256, 1024, 4096, 8192],
        help="bytes per window of held-out text",
    )
    parser.set_defaults(windows=8)
    parser.add_model_size(dim=48, heads=2, layers=1)
    parser.add_training(steps=250, batch=4, learning_rate=1e-2, rows="rows")
    parser.add_save()
    return parse(parser, argv)


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    from claims.byte_models import bits_per_byte, load_text, make_model, train

    longest = max(arguments.lengths)
    splits = load_text(arguments, max(arguments.length, longest))
    rows = []
    for attention in arguments.attention:
        bits = {length: [] for length in arguments.lengths}
        for seed in arguments.seeds:
            model = make_model(attention, seed, arguments, convolution=4)
            train(model, splits["train"], seed, arguments)
            for length, measured in bits.items():
                scored = max(1, min(length, arguments.length) // 2)
                windows = arguments.windows, longest
                measured.append(
                    bits_per_byte(model, splits["test"], length, scored, *windows)
                )
                print(f"{attention} {seed} {length}: {measured[-1]:.3f}", flush=True)
        rows.append([attention, *(mean_and_spread(x, 3) for x in bits.values())])
    show(["attention", *arguments.lengths], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
