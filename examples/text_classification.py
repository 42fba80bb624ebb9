"""Classifies long texts with an attention layer of this package, and with softmax.

    python examples/text_classification.py
    python examples/text_classification.py --length 16384 --batch 2
    python examples/text_classification.py --csv reviews.csv --attention performer

By default the texts are windows of the Python standard library's source files, and the
label is the package of the file. Accuracy is measured on windows of held-out files.
`--csv` reads your own texts, from the columns `text` and `label`. Each attention trains
on the same batches, and a table compares accuracy and time.
"""

import sys

from command_line import Parser, UsageError, command, positive
from tables import show
from text_classes.data import csv_file, standard_library


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_attention("local:window=64,rotary_wavelength=10000")
    add("--baseline", default="softmax", metavar="NAME", help="what to compare with")
    add("--csv", metavar="FILE", help="texts and labels; default: standard library")
    add("--classes", type=positive, default=8, help="packages to tell apart")
    add("--length", type=positive, default=4096, help="bytes of a window")
    parser.add_model_size(dim=64, heads=4, layers=2)
    parser.add_training(steps=150, batch=4, learning_rate=2e-3, rows="windows")
    add("--test-windows", type=positive, default=16, help="at most, of each class")
    parser.add_seed_and_verbose()
    parser.add_save()
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Trains each attention, and prints the comparison."""
    if arguments.csv:
        texts = csv_file(arguments.csv)
    else:
        texts = standard_library(arguments.classes)
    # Imported here because Keras reads the backend on import.
    from text_classes.training import make_model, train_and_measure

    names = list(dict.fromkeys([arguments.attention, arguments.baseline]))
    try:
        for name in names:
            make_model(name, len(texts.labels), arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"{len(texts.labels)} classes: {', '.join(texts.labels)}", flush=True)
    results = []
    for name in names:
        print(f"\n== {name}", flush=True)
        results.append(train_and_measure(name, texts, arguments))
    show(*table(results), arguments)
    print(
        f"{arguments.steps} steps of {arguments.batch} windows of {arguments.length} "
        f"bytes; {results[0]['windows']} held-out windows; "
        f"chance {1 / len(texts.labels):.1%}"
    )


def table(results):
    """Header and rows: the comparison."""
    rows = [
        [
            result["attention"],
            f"{result['accuracy']:.1%}",
            f"{result['seconds_per_step']:.3f}",
            f"{result['seconds']:.1f}",
            f"{result['parameters']:,}",
        ]
        for result in results
    ]
    return ["attention", "accuracy", "s/step", "training s", "parameters"], rows


if __name__ == "__main__":
    sys.exit(main())
