"""The duplication task of the Reformer paper, with hashed and with full attention.

    python examples/reformer_duplication.py
    python examples/reformer_duplication.py --length 512 --steps 4000

A sequence is `0 w 0 w`, for random words w; a one-layer causal model learns to generate
the second half. Each model is trained with full attention (with shared queries and
keys) or with a number of hash rounds, and evaluated with all of these settings: the
weights are the same, only the number of rounds differs. The table also shows the
paper's results, for length 1,024 and 150,000 steps.
"""

import sys

from command_line import Parser, UsageError, check_heads, command, positive

FULL = "full"
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
    add("--length", type=positive, default=256, help="of a sequence, even")
    add("--symbols", type=positive, default=63, help="that words are made of")
    add("--bucket-size", type=positive, default=32)
    add("--buckets", type=positive, default=8, help="an even number")
    parser.add_model_size(dim=64, heads=4)
    parser.add_training(steps=800, batch=16, learning_rate=3e-3)
    add("--test-sequences", type=positive, default=256)
    parser.add_seed_and_verbose()
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
    for trained in arguments.train:
        print(f"\n== trained with {label(trained)}", flush=True)
        rows[trained] = accuracies(trained, arguments)
        print(
            ", ".join(
                f"{label(evaluated)}: {100 * accuracy:.1f}"
                for evaluated, accuracy in rows[trained].items()
            ),
            flush=True,
        )
    print("\n" + table(rows, arguments.evaluate))


def label(setting):
    return setting if setting == FULL else f"LSH-{setting}"


def table(rows, evaluated):
    """Accuracy in percent, and the paper's in brackets."""
    header = ["trained", *map(label, evaluated)]
    lines = [header, ["---"] * len(header)]
    for trained, row in rows.items():
        cells = [label(trained)]
        for column in evaluated:
            paper = PAPER.get((trained, column))
            known = "" if paper is None else f" ({paper:g})"
            cells.append(f"{100 * row[column]:.1f}{known}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
