"""Trains Transformer-VQ over segments, with its codes as memory.

    python examples/vq_recurrence.py
    python examples/vq_recurrence.py --text book.txt --segment 256 --codes 256

Documents are read in segments. The attention layers' state (the exact window, and the
sums and counts of the codes) carries over to the next segment, and gradients stop at
segment boundaries. No position is read twice, and the cost of a step does not grow with
the context. A second model, with the same initial weights and batches, starts every
segment with an empty state. Both are tested with and without the context, in bits per
byte; "later" excludes the first quarter of each document. Documents longer than in
training would have code counts, and so weights, that the model has not seen.

The model follows Lingle, 2023 (arXiv 2309.16354): gated attention units with one head.
The text is the Python standard library's source, or `--text`.
"""

import sys
from pathlib import Path

from command_line import Parser, command, positive
from tables import mean_and_spread, show


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--text", type=Path, help="a file, or a folder of files")
    add("--segment", type=positive, default=128, help="bytes")
    add("--document", type=positive, default=16, help="segments")
    add("--window", type=positive, default=64, help="bytes attended to exactly")
    add("--codes", type=positive, default=128)
    add("--units", type=positive, default=4)
    add("--dim", type=positive, default=96, help="width")
    add("--key-dim", type=positive, default=48)
    parser.add_training(steps=600, batch=16, learning_rate=2e-3, rows="segments")
    parser.add_seeds()
    add("--test-bytes", type=positive, default=2**17)
    parser.add_verbose()
    parser.add_save()
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # Imported here because Keras reads the backend on import.
    from truncation.training import TESTED, TRAINED, bits_per_byte

    header = ["trained", *(f"tested {how}, {part}" for how, part in TESTED)]
    results = {trained: [] for trained in TRAINED}
    for seed in arguments.seeds:
        for trained in TRAINED:
            print(f"\n== {trained}, seed {seed}", flush=True)
            results[trained].append(bits_per_byte(trained, seed, arguments))
    rows = [
        [trained, *(mean_and_spread(x, 3) for x in zip(*seeds, strict=True))]
        for trained, seeds in results.items()
    ]
    show(header, rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
