"""Parity and addition with RNNs with adaptive computation time.

    python examples/adaptive_computation.py
    python examples/adaptive_computation.py --tasks parity --size 16 --steps 9000

Smaller versions of the tasks of Graves, 2016: whether an odd number of a vector's
entries is 1, in one position; and running sums of numbers, digit by digit. Each RNN
trains without adaptive computation time and with it, for each ponder cost. A table
shows the accuracy on newly drawn sequences (8 entries make 510 vectors, all of which
occur in training) and the steps by difficulty (number of entries or digits), means over
`--seeds`. A plot of both is written to `--out`.
"""

import statistics
import sys

from command_line import (
    Parser,
    UsageError,
    command,
    each_seed,
    make_folder,
    not_negative,
    positive,
)
from tables import mean_and_spread, show

# The defaults of each task; the size is the number of entries or digits.
TASKS = {
    "parity": dict(size=8, cell="simple", units=128, steps=1500, learning_rate=1e-3),
    "addition": dict(size=2, cell="lstm", units=64, steps=4000, learning_rate=3e-3),
}
# Maximum digits of numbers whose sums fit in 64-bit integers.
MAX_DIGITS = 17
# Error in percent, Graves, 2016: vectors of 64 entries and a simple cell of 128 units;
# an LSTM cell of 512.
PAPER = {"parity": "40 without, below 5 with", "addition": "about 0 with"}


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add(
        "--ponder-cost",
        nargs="+",
        type=not_negative,
        default=[0.001, 0.01],
        metavar="COST",
        help="each a training with adaptive computation time",
    )
    add("--size", type=positive, help="entries of parity, digits of a number")
    add("--cell", choices=("simple", "lstm"))
    add("--units", type=positive)
    add("--max-steps", type=positive, default=8)
    add("--halting-bias", type=float, default=1.0)
    parser.add_training(steps=None, batch=64, learning_rate=None)
    add("--test-sequences", type=positive, default=4096)
    parser.add_seeds()
    parser.add_verbose()
    parser.add_out("runs/adaptive_computation", "the picture")
    parser.add_save()
    arguments = parser.parse_args(argv)
    if "addition" in arguments.tasks and (arguments.size or 1) > MAX_DIGITS:
        raise UsageError(
            f"--size must be {MAX_DIGITS} or less for addition; received --size "
            f"{arguments.size}"
        )
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains the RNNs of each task, and prints and plots the results."""
    make_folder(arguments.out)
    picture = arguments.out / "steps.png"
    # Imported here because Keras reads the backend on import.
    from pondering import tasks
    from pondering.pictures import write_picture
    from pondering.training import train_and_measure

    results = {}
    for task in arguments.tasks:
        results[task] = []
        settings = dict(TASKS[task])
        for name in settings:
            settings[name] = getattr(arguments, name) or settings[name]
        for cost in (None, *arguments.ponder_cost):
            label = "without" if cost is None else f"cost {cost:g}"
            print(f"== {task}, {settings['cell']} cell, {label}", flush=True)
            measured = []
            for each in each_seed(arguments):
                found = train_and_measure(tasks.TASKS[task], cost, settings, each)
                print(f"seed {each.seed}: {found['accuracy']:.1%} right", flush=True)
                measured.append(found)
            results[task].append((label, mean_of(measured)))
    for task in results:
        print(f"{task}: error in the paper, in percent: {PAPER[task]}")
    show(*table(results), arguments)
    write_picture(results, picture)
    print(f"\nAccuracy and steps by difficulty: {picture}")


def mean_of(measured):
    """Combines the results of `train_and_measure` for each seed.

    Returns:
        Dict of `right`, in percent, and `steps`, both as texts, and `by_difficulty`.
    """
    difficulties = [each["by_difficulty"] for each in measured]
    return {
        "right": mean_and_spread([100 * each["accuracy"] for each in measured], 1),
        "steps": mean_and_spread([each["mean_steps"] for each in measured], 2),
        "by_difficulty": {
            difficulty: [
                statistics.fmean(each[difficulty][i] for each in difficulties)
                for i in range(2)
            ]
            for difficulty in difficulties[0]
        },
    }


def table(results):
    """Header and rows: correct sequences, and steps and accuracy by difficulty."""
    lines = []
    for task, measured in results.items():
        for label, result in measured:
            by_difficulty = ", ".join(
                f"{difficulty}: {steps:.2f} ({accuracy:.0%})"
                for difficulty, (accuracy, steps) in result["by_difficulty"].items()
            )
            lines.append([task, label, result["right"], result["steps"], by_difficulty])
    return ["task", "ponder cost", "accuracy, %", "steps", "by difficulty"], lines


if __name__ == "__main__":
    sys.exit(main())
