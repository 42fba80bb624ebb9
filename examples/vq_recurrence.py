"""Trains Transformer-VQ through time, truncated, with its codes for a memory.

    python examples/vq_recurrence.py
    python examples/vq_recurrence.py --text book.txt --segment 256 --codes 256

Documents are read in segments. The state of the attention layers, the exact window and
the sums and counts of the codes, goes on from one to the next, and gradients end where
a segment begins: no position is read twice, and the cost of a step does not grow with
what came before. A second model, of the same weights and batches, begins every segment
with an empty state. Both are tested with and without what came before, in bits per
byte; "later" leaves out the first quarter of each document. Longer documents than those
of training would have codes with counts, and so weights, that the model has not seen.

The model is that of Lingle, 2023 (arXiv 2309.16354): gated attention units of one
head. The text is the Python standard library's source, or that of `--text`.
"""

import sys
from pathlib import Path

from command_line import Parser, command, natural, positive


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
    add("--seeds", nargs="+", type=natural, default=[0])
    add("--test-bytes", type=positive, default=2**17)
    parser.add_verbose()
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    from truncation.training import TESTED, TRAINED, bits_per_byte

    header = ["trained", "seed"]
    header += [f"tested {how}, {part}" for how, part in TESTED]
    rows = [header, ["---"] * len(header)]
    for seed in arguments.seeds:
        for trained in TRAINED:
            print(f"\n== {trained}, seed {seed}", flush=True)
            results = bits_per_byte(trained, seed, arguments)
            rows.append([trained, f"{seed}", *(f"{x:.3f}" for x in results)])
    print("\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
