"""Copying, reversing and adding with a Universal Transformer.

    python examples/universal_transformer.py
    python examples/universal_transformer.py --tasks reverse --models adaptive \
        --depth 8 --steps 5000

Trains on short sequences and tests on longer ones: a Universal Transformer, one with
adaptive computation time, and a vanilla Transformer of as many parameters, encoder and
decoder each. All add positions in each layer, with random offsets in training, so that
training covers the positions of the longer sequences. Norms precede the sublayers;
`--form paper` has the paper's form. The table has the share of
correctly generated symbols and whole sequences, with several `--seeds` their means and
standard deviations, next to the paper's (trained at 40 symbols, tested at 400).
"""

import statistics
import sys

from command_line import (
    Parser,
    UsageError,
    command,
    each_seed,
    natural,
    not_negative,
    positive,
)
from tables import mean_and_spread, show

TASKS = ("copy", "reverse", "addition")
MODELS = ("vanilla", "universal", "adaptive")
# Accuracy of symbols and of sequences: Dehghani et al., 2019, table 3.
PAPER = {
    ("copy", "vanilla"): (0.53, 0.03),
    ("reverse", "vanilla"): (0.13, 0.06),
    ("addition", "vanilla"): (0.07, 0.0),
    ("copy", "universal"): (0.91, 0.35),
    ("reverse", "universal"): (0.96, 0.46),
    ("addition", "universal"): (0.34, 0.02),
}


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_attention(
        "softmax", "a causal layer of this package, with options of its constructor"
    )
    add(
        "--transition",
        choices=("feed_forward", "separable_convolution"),
        default="feed_forward",
        help="of the Universal Transformers",
    )
    add(
        "--form",
        choices=("pre_norm", "paper"),
        default="pre_norm",
        help="norms before sublayers and learned steps, or as in the paper",
    )
    add("--train-length", type=positive, default=8, help="the longest, of the input")
    add("--test-lengths", nargs="+", type=positive, default=[8, 12, 16])
    add("--position-offset", type=natural, default=16, help="the largest, in training")
    add("--alphabet", type=positive, default=10, help="symbols to copy and reverse")
    add("--depth", type=positive, default=4, help="recurrences, and vanilla layers")
    add("--dim", type=positive, default=64, help="width of the Universal Transformers")
    add("--heads", type=positive, default=4)
    add("--ponder-cost", type=not_negative, default=0.001)
    add("--halting-bias", type=float, default=-1.0)
    parser.add_training(steps=800, batch=64, learning_rate=1e-3)
    add("--warmup", type=natural, default=0, help="steps in which the rate rises")
    add("--test-sequences", type=positive, default=256)
    parser.add_seeds()
    parser.add_verbose()
    parser.add_save()
    arguments = parser.parse_args(argv)
    if arguments.train_length < 3 or min(arguments.test_lengths) < 3:
        raise UsageError(
            "--train-length and --test-lengths must be 3 or more; received "
            f"--train-length {arguments.train_length} --test-lengths "
            f"{' '.join(map(str, arguments.test_lengths))}"
        )
    if arguments.dim % (2 * arguments.heads):
        raise UsageError(
            "--dim must be a multiple of twice --heads; received --dim "
            f"{arguments.dim} --heads {arguments.heads}"
        )
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains and tests each model on each task, and prints the table."""
    # Imported here because Keras reads the backend on import.
    from algorithms.training import build_model, train_and_measure

    for model in arguments.models:
        try:
            build_model(model, arguments.tasks[0], arguments)
        except (ValueError, TypeError) as error:
            message = str(error).replace("\n", " ")
            raise UsageError(f"--attention {arguments.attention}: {message}") from error
    results = {}
    for task in arguments.tasks:
        for model in arguments.models:
            results[task, model] = []
            for each in each_seed(arguments):
                print(f"== {task}, {model}, seed {each.seed}", flush=True)
                results[task, model].append(train_and_measure(model, task, each))
                shown = cells(results[task, model][-1:], arguments)
                print(", ".join(shown), flush=True)
    show(*table(results, arguments), arguments)
    print(
        "Symbols/sequences right; trained at lengths up to "
        f"{arguments.train_length}, {arguments.steps} steps of {arguments.batch}."
    )


def cells(measured, arguments):
    """Shares of symbols/sequences at each length, over the seeds."""
    shares = [
        zip(*(each["accuracy"][length] for each in measured), strict=True)
        for length in arguments.test_lengths
    ]
    return ["/".join(mean_and_spread(part, 2) for part in parts) for parts in shares]


def table(results, arguments):
    """Header and rows: shares of symbols/sequences by length, and the paper's."""
    header = ["task", "model", "parameters", "steps", "seconds"]
    header += [f"length {length}" for length in arguments.test_lengths]
    header += ["paper, 400"]
    lines = []
    for (task, model), measured in results.items():
        steps = [[arguments.depth]]
        if measured[0]["ponder"] is not None:
            ponders = [each["ponder"].values() for each in measured]
            steps = zip(*ponders, strict=True)
        paper = PAPER.get((task, model))
        lines.append(
            [
                task,
                model,
                f"{measured[0]['parameters']:,}",
                "/".join(f"{statistics.fmean(part):.3g}" for part in steps),
                f"{statistics.fmean(each['seconds'] for each in measured):.0f}",
                *cells(measured, arguments),
                "-" if paper is None else "/".join(f"{share:.2f}" for share in paper),
            ]
        )
    return header, lines


if __name__ == "__main__":
    sys.exit(main())
