"""Measures the quality of every attention layer in one plain model, task by task.

    python research/verdict_run.py language --backend jax
    python research/verdict_run.py recall --candidates gated-delta softmax --seeds 0

Each part trains every candidate on the same batches, with a convolution of 4 before the
attention and without; `verdict/candidates.py` lists them, and the module of a part in
`verdict/` has its task and sizes. The part `cost` measures time and memory of the
layers instead, on a machine that does nothing else. A run becomes a JSON file with its
sizes, seed, versions, machine and date when it ends; the command, given again, skips
those. `verdict_page.py` makes the tables of the documentation from them.
"""

import ast
import importlib
import sys

import folders  # noqa: F401
from claims.arguments import SEEDS
from command_line import Parser, UsageError, command, make_folder
from verdict.candidates import CANDIDATES, PARTS
from verdict.runs import RESULTS, Runs


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("part", choices=[*PARTS, "cost"])
    add("--candidates", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    add(
        "--convolution",
        choices=("with", "without", "both"),
        default="both",
        help="of 4 before the attention",
    )
    parser.add_seeds(SEEDS)
    add(
        "--sizes",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="others than the part's; such runs are apart from its own",
    )
    parser.add_out(RESULTS, "the runs")
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Runs what is missing, seed by seed, and prints the results."""
    # It imports Keras, which reads the backend once.
    import keras

    part = importlib.import_module(f"verdict.{arguments.part}")
    sizes = {**part.SIZES, **changed_sizes(arguments.sizes, part.SIZES)}
    make_folder(arguments.out)
    if arguments.part == "cost":
        from keras_efficient_attn.benchmark.report import table

        folder = arguments.out / "cost"
        for comparison in part.measure(folder, arguments.candidates, sizes):
            print(table(comparison), flush=True)
        return
    runs = Runs(arguments.out, arguments.part, sizes)
    variants = {"with": [True], "without": [False], "both": [True, False]}
    for seed in arguments.seeds:
        for name in arguments.candidates:
            candidate = CANDIDATES[name]
            if arguments.part not in candidate.parts:
                continue
            for convolution in variants[arguments.convolution]:
                options = part.options(candidate, convolution)
                if options is None:
                    continue
                record = runs.run(name, convolution, seed, options, part.measure)
                shown = " with convolution" if convolution else ""
                print(f"{name}{shown}, seed {seed}: {record['result']}", flush=True)
                keras.utils.clear_session(free_memory=True)


def changed_sizes(words, sizes):
    """The dict of `NAME=VALUE` words, or `UsageError`."""
    changed = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in sizes:
            raise UsageError(
                f"--sizes {word}: there is no such size; choose from {', '.join(sizes)}"
            )
        try:
            changed[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            changed[name] = value
        # A text is a path, in place of `None`.
        kind = str if sizes[name] is None else type(sizes[name])
        if not isinstance(changed[name], kind):
            raise UsageError(f"--sizes {word}: the value must be a {kind.__name__}")
        if kind is dict:
            changed[name] = {**sizes[name], **changed[name]}
    return changed


if __name__ == "__main__":
    sys.exit(main())
