"""The duplication task of the Reformer paper, with hashed and with full attention.

    python examples/reformer_duplication.py
    python examples/reformer_duplication.py --length 512 --steps 4000
    python examples/reformer_duplication.py --train 1 2 --aligned yes no --seeds 0 1 2

A sequence is `0 w 0 w`, for random words w; a one-layer causal model learns to write
the second half. Each model is trained with full attention (of shared queries and keys)
or with a number of hash rounds, and evaluated with all of them: the weights are the
same, only the number of rounds differs. The table stands beside the paper's, of length
1,024 and 150,000 steps.

With `--aligned yes`, each bucket starts a chunk of its own, which is exactly causal.
With `no`, chunks run on across buckets, as published: which chunk a position is in then
depends on later positions. With several `--seeds`, the table has means and standard
deviations.
"""

import sys

from command_line import Parser, UsageError, check_heads, command, positive
from tables import mean_and_spread, show

FULL = "full"
ALIGNED = {"yes": True, "no": False}
# Accuracy in percent on the second half: Kitaev et al., 2020, table 2.
PAPER = {
    (FULL, FULL): 100,
    (FULL, 8): 94.8,
    (FULL, 4): 92.5,
    (FULL, 2): 76.9,
    (FULL, 1): 52.5,
    (4, FULL): 0.8,
    (4, 8): 100,
    (4, 4): 99.9,
    (4, 2): 99.4,
    (4, 1): 91.9,
    (2, FULL): 0.8,
    (2, 8): 100,
    (2, 4): 99.9,
    (2, 2): 98.1,
    (2, 1): 86.8,
    (1, FULL): 0.8,
    (1, 8): 99.9,
    (1, 4): 99.6,
    (1, 2): 94.8,
    (1, 1): 77.9,
}


def setting(text):
    """`"full"`, or a number of rounds."""
    return FULL if text == FULL else positive(text)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    names = dict(nargs="+", type=setting, metavar="full|ROUNDS")
    add("--train", default=[FULL, 1, 2, 4], help="settings to train", **names)
    add("--evaluate", default=[FULL, 1, 2, 4, 8], help="settings to evaluate", **names)
    add(
        "--aligned",
        nargs="+",
        choices=ALIGNED,
        default=["yes"],
        help="whether each bucket starts a chunk",
    )
    add("--length", type=positive, default=256, help="of a sequence, even")
    add("--symbols", type=positive, default=63, help="that words are made of")
    add("--bucket-size", type=positive, default=32)
    add("--buckets", type=positive, default=8, help="an even number")
    parser.add_model_size(dim=64, heads=4)
    parser.add_training(steps=800, batch=16, learning_rate=3e-3)
    add("--test-sequences", type=positive, default=256)
    parser.add_seeds()
    parser.add_verbose()
    parser.add_save()
    arguments = parser.parse_args(argv)
    for option, number in (
        ("--length", arguments.length),
        ("--buckets", arguments.buckets),
    ):
        if number % 2:
            raise UsageError(f"{option} must be even; received {option} {number}")
    check_heads(arguments.dim, arguments.heads)
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains with each setting, evaluates with all, and prints the table."""
    # Imported here because Keras reads the backend on import.
    from duplication.training import accuracies

    rows = {}
    for aligned in arguments.aligned:
        for trained in arguments.train:
            row = rows[trained, aligned] = {name: [] for name in arguments.evaluate}
            for seed in arguments.seeds:
                print(
                    f"\n== trained with {label(trained)}, aligned: {aligned}, "
                    f"seed {seed}",
                    flush=True,
                )
                measured = accuracies(trained, ALIGNED[aligned], seed, arguments)
                for evaluated, accuracy in measured.items():
                    row[evaluated].append(100 * accuracy)
                    print(f"{label(evaluated)}: {100 * accuracy:.1f}", flush=True)
    show(*table(rows, arguments.evaluate), arguments)


def label(setting):
    return setting if setting == FULL else f"LSH-{setting}"


def table(rows, evaluated):
    """Header and rows: accuracy in percent, and the paper's in brackets."""
    header = ["trained", "aligned", *map(label, evaluated)]
    lines = []
    for (trained, aligned), row in rows.items():
        cells = [label(trained), aligned]
        for column in evaluated:
            paper = PAPER.get((trained, column))
            known = "" if paper is None else f" ({paper:g})"
            cells.append(f"{mean_and_spread(row[column], 1)}{known}")
        lines.append(cells)
    return header, lines


if __name__ == "__main__":
    sys.exit(main())
