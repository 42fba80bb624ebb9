"""Compares the recall of attention layers with their state sizes.

    python examples/associative_recall.py
    python examples/associative_recall.py --task forgetting --dim 32 64 --pairs 4 16
    python examples/associative_recall.py --task parity --plot parity.png

`recall`: a sequence has pairs of a key and a value, then each key again, for which the
model must predict the value (multi-query associative recall). A model is trained on all
numbers of `--pairs` alternately, and tested on each. `forgetting`: the same, but each
key is written `--writes` times, and the last value counts. `parity`: whether the number
of 1s so far is odd, tested at 2, 4 and 8 times the training length, where only the
second half of the positions counts. `permutations`: the same of the order of three
things, after all reorderings so far.

All contestants have no positions and the same depthwise convolution over the last
`--convolution` positions before attention, which connects a value to its key. The delta
layers do not use their own default convolution. The bytes are those of the attention
layers' states for one row; for softmax, of its cache at the longest length.

Every run, of one attention, width, learning rate and seed, becomes a line of
`runs.jsonl` in `--out` when it ends; the command, given again, skips those. With
several `--learning-rates` the table has the best in validation for each attention and
width. The tasks are those of Arora et al., 2023 (arXiv 2312.04927), and Grazzi et al.,
2024 (arXiv 2411.12537).
"""

import sys
from pathlib import Path

from associations import TRACKING
from command_line import (
    Parser,
    UsageError,
    check_convolution,
    check_heads,
    command,
    make_folder,
    natural,
    positive,
    positive_float,
)
from tables import show

TASKS = ("recall", "forgetting", "parity", "permutations")
CONTESTANTS = (
    "softmax",
    "linear:feature_map=elu",
    "performer:num_features=64",
    "linear:feature_map=taylor,window=16,key_dim=16,value_dim=32",
    "vq:num_codes=64,window=16",
    "retention",
    "retention:feature_map=unit,activation=silu",
    "gated-linear",
    "gated-linear:feature_map=unit,activation=silu",
    "delta:convolution=None",
    "gated-delta:convolution=None",
)
TRACKING_CONTESTANTS = (
    "softmax",
    "linear:feature_map=elu",
    "gated-linear",
    "delta:convolution=None",
    "delta:convolution=None,max_beta=2.0",
    "gated-delta:convolution=None",
    "gated-delta:convolution=None,max_beta=2.0",
)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--task", choices=TASKS, default="recall")
    parser.add_attention(
        [], "contestants, with options; default: those of docs/benchmarks/recall.md"
    )
    add("--pairs", nargs="+", type=positive, help="keys in a sequence")
    add("--writes", type=positive, default=2, help="of each key, for forgetting")
    add(
        "--length", type=positive, help="of training; default: 64; to track a state, 32"
    )
    add("--vocabulary", type=positive, default=256)
    add("--dim", nargs="+", type=positive, default=[32], help="widths")
    add("--layers", type=positive, default=1)
    add("--heads", type=positive, default=1)
    add("--convolution", type=natural, default=4, help="positions; 0 for none")
    add("--steps", type=positive, default=1000, help="of training, at most")
    add("--batch", type=positive, default=16, help="sequences of a batch")
    add("--learning-rates", nargs="+", type=positive_float, default=[5e-3])
    parser.add_seeds((0, 1, 2))
    add("--stop-at", type=positive_float, default=0.99, help="least accuracy")
    add("--validate-every", type=positive, default=100, help="steps")
    add("--test-sequences", type=positive, default=256)
    add("--verbose", type=int, default=0, help="1: accuracy at each validation")
    add("--plot", type=Path, metavar="FILE", help="of accuracy by bytes, or by length")
    parser.add_out("runs/associative_recall", "runs.jsonl")
    parser.add_save()
    return check(parser.parse_args(argv))


def check(arguments):
    """The arguments with the defaults of their task, or `UsageError`."""
    tracking = arguments.task in TRACKING
    arguments.attention = arguments.attention or list(
        TRACKING_CONTESTANTS if tracking else CONTESTANTS
    )
    arguments.length = arguments.length or (32 if tracking else 64)
    for dim in arguments.dim:
        check_heads(dim, arguments.heads)
    check_convolution(arguments.convolution)
    if tracking:
        if arguments.pairs:
            raise UsageError(
                f"--pairs does not apply to --task {arguments.task}: leave it out"
            )
        arguments.pairs, arguments.writes = [], 0
        arguments.vocabulary = TRACKING[arguments.task]
        return arguments
    if arguments.task == "recall":
        arguments.writes = 1
        arguments.pairs = arguments.pairs or [4, 8, 16, 20]
    arguments.pairs = arguments.pairs or [4, 8, 12]
    most = max(arguments.pairs)
    needed = most * (2 * arguments.writes + 1)
    if needed > arguments.length:
        raise UsageError(
            f"--length must be at least {needed} for --pairs {most}, each written "
            f"{arguments.writes} times; received --length {arguments.length}"
        )
    if arguments.vocabulary // 2 <= most * arguments.writes:
        raise UsageError(
            f"--vocabulary must be at least {2 * (most * arguments.writes + 1)} for "
            f"--pairs {most}, each written {arguments.writes} times; received "
            f"--vocabulary {arguments.vocabulary}"
        )
    return arguments


@command(parse_arguments)
def main(arguments):
    """Runs the trainings that are missing in `runs.jsonl`, and prints the table."""
    make_folder(arguments.out)
    # Imported here because Keras reads the backend on import.
    from associations.results import Runs, plot, table
    from associations.training import build_model, run

    for attention in arguments.attention:
        for dim in arguments.dim:
            build_model(attention, dim, arguments)
    runs = Runs(arguments)
    for seed in arguments.seeds:
        for dim in arguments.dim:
            for attention in arguments.attention:
                for rate in arguments.learning_rates:
                    if not runs.find(attention, dim, rate, seed):
                        result = run(attention, dim, rate, seed, arguments)
                        runs.add(attention, dim, rate, seed, result)
    show(*table(runs, arguments), arguments)
    if arguments.plot:
        plot(arguments.plot, runs, arguments)
        print(f"Wrote {arguments.plot}")


if __name__ == "__main__":
    sys.exit(main())
