"""Measures how far back Transformer-XL remembers a symbol.

    python examples/xl_recall.py
    python examples/xl_recall.py --models 1x8 2x8 2x16 --steps 1000

A document has one symbol in its first segment and nothing else for several segments.
The model must predict the symbol at every later position. Gradients never cross the end
of a segment. Each layer reaches one memory further back than the layer below: a model
of `layers` layers with a memory of `memory` positions knows symbols up to `layers *
memory` positions before its segment, and guesses beyond. The table has the accuracy by
the number of segments in between, over `--seeds`, with a bracket where that reach ends.
"""

import sys

from command_line import (
    Parser,
    UsageError,
    check_heads,
    command,
    each_seed,
    natural,
    positive,
)
from tables import mean_and_spread, show


def sizes(text):
    """Parses `"2x8"` as layers and memory positions (0 or more)."""
    layers, _, memory = text.partition("x")
    return positive(layers), natural(memory)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        type=sizes,
        metavar="LAYERSxMEMORY",
        default=[(1, 0), (1, 8), (2, 8), (3, 8), (2, 16)],
    )
    add(
        "--longer",
        type=positive,
        default=2,
        help="evaluate with this many times the memory of training, too",
    )
    add("--segment", type=positive, default=8, help="positions in a segment")
    add("--segments", type=positive, default=6, help="segments in a document")
    add("--symbols", type=positive, default=8)
    parser.add_model_size(dim=32, heads=2)
    parser.add_training(steps=1200, batch=32, learning_rate=3e-3, rows="segments")
    add("--test-documents", type=positive, default=512)
    parser.add_seeds()
    parser.add_verbose()
    parser.add_save()
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    for layers, memory in arguments.models:
        if memory % arguments.segment:
            raise UsageError(
                "--models: each memory must be a multiple of --segment; received "
                f"{layers}x{memory} with --segment {arguments.segment}"
            )
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains and evaluates each model, and prints the table."""
    # Imported here because Keras reads the backend on import.
    from recall.training import accuracies

    rows = {}
    for layers, memory in arguments.models:
        print(f"\n== {layers} layers, memory {memory}", flush=True)
        for each in each_seed(arguments):
            for evaluated, row in accuracies(layers, memory, each).items():
                rows.setdefault((layers, memory, evaluated), []).append(row)
    show(*table(rows, arguments), arguments)
    print(f"A guess is right in {100 / arguments.symbols:.1f} % of the cases.")


def table(rows, arguments):
    """Header and rows: accuracy in percent by the segments since the symbol.

    Args:
        rows: Dict from layers, memory and memory in evaluation to `accuracies` of each
            seed.
        arguments: The parsed command line.
    """
    header = ["layers", "memory", "in evaluation", "reach"]
    header += [f"{back} back" for back in range(arguments.segments)]
    lines = []
    for (layers, memory, evaluated), found in rows.items():
        reach = layers * evaluated
        cells = [
            mean_and_spread([100 * accuracy for accuracy in seeds], 1)
            for seeds in zip(*found, strict=True)
        ]
        if reach // arguments.segment + 1 < len(cells):
            cells[reach // arguments.segment] += " ]"
        lines.append([layers, memory, evaluated, reach, *cells])
    return header, lines


if __name__ == "__main__":
    sys.exit(main())
