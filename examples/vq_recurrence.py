"""Trains Transformer-VQ over segments, with its codes as memory.

    python examples/vq_recurrence.py
    python examples/vq_recurrence.py --codes 64 16 256 --window 16 64 --no-gradient
    python examples/vq_recurrence.py --text book.txt --segment 256 --codes 256

Documents are read in segments. The attention layers' state (the exact window, and the
sums and counts of the codes: the cache) carries over to the next segment, and gradients
stop at segment boundaries. No position is read twice, and the cost of a step does not
grow with the context. Models with the same initial weights and batches are trained in
four ways: with the state (`cache`); with its window alone (`window`); with an empty
state at each segment (`nothing`); and with an empty state in the first half of the
training and the whole in the second (`cache-later`). Each is tested in the first three
ways, in bits per byte without the first quarter of each document; the last column
compares models of the same seed. Documents longer than in training would have code
counts, and so weights, that the model has not seen.

The first numbers of `--codes` and `--window` are those of a model; each further one
replaces its own. `--no-gradient` adds a model whose values do not learn from queries
beyond the window (`gradient_through_cache=False`).

The model follows Lingle, 2023 (arXiv 2309.16354): gated attention units with one head.
The text is the Python standard library's source, or `--text`.
"""

import argparse
import sys
from pathlib import Path

from command_line import Parser, command, positive
from tables import mean_and_spread, show

TRAINED = ("cache", "window", "nothing", "cache-later")


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--text", type=Path, help="a file, or a folder of files")
    add("--segment", type=positive, default=64, help="bytes")
    add("--document", type=positive, default=16, help="segments")
    add(
        "--window",
        nargs="+",
        type=positive,
        default=[16],
        help="bytes attended to exactly",
    )
    add("--codes", nargs="+", type=positive, default=[64])
    add(
        "--no-gradient",
        action="store_true",
        help="also a model without gradients through the cache",
    )
    add("--trained", nargs="+", choices=TRAINED, default=list(TRAINED))
    add("--units", type=positive, default=2)
    add("--dim", type=positive, default=64, help="width")
    add("--key-dim", type=positive, default=32)
    parser.add_training(steps=1600, batch=8, learning_rate=4e-3, rows="segments")
    parser.add_seeds()
    add("--test-bytes", type=positive, default=2**17)
    parser.add_verbose()
    parser.add_save()
    return parser.parse_args(argv)


def configurations(arguments):
    """The arguments of each model: the first values, with one replaced at a time."""
    first = {"codes": arguments.codes[0], "window": arguments.window[0]}
    first["gradient"] = True
    others = [{"codes": number} for number in arguments.codes[1:]]
    others += [{"window": number} for number in arguments.window[1:]]
    others += [{"gradient": False}] * arguments.no_gradient
    return [
        argparse.Namespace(**vars(arguments) | first | other) for other in [{}, *others]
    ]


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # Imported here because Keras reads the backend on import.
    from truncation.training import KEPT, bits_per_byte

    header = ["codes", "window", "gradient", "trained with"]
    header += [f"tested with {kept}" for kept in KEPT]
    header.append(f"cache, less that of {arguments.trained[0]}")
    rows = []
    for each in configurations(arguments):
        options = [each.codes, each.window, "yes" if each.gradient else "no"]
        first = None
        for trained in arguments.trained:
            measured = []
            for seed in arguments.seeds:
                print(*options, trained, f"seed {seed}", flush=True)
                measured.append(bits_per_byte(trained, seed, each))
            cells = [mean_and_spread(x, 3) for x in zip(*measured, strict=True)]
            with_cache = [bits[0] for bits in measured]
            first = first or with_cache
            differences = [a - b for a, b in zip(with_cache, first, strict=True)]
            rows.append([*options, trained, *cells, mean_and_spread(differences, 3)])
    show(header, rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
