"""The arguments and errors that the examples' command lines share."""

import argparse
import functools
import importlib.util
import inspect
import math
import os
import sys
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")


class UsageError(Exception):
    """An argument that cannot be honoured; its message is one line."""


class Parser(argparse.ArgumentParser):
    """Parses a script's arguments, with `--backend` and options that scripts share.

    Says what is wrong with an argument in one line, without the usage.

    Args:
        doc: The script's docstring, whose first line describes it.
    """

    def __init__(self, doc):
        super().__init__(description=doc.split("\n")[0])
        self.add_argument(
            "--backend", choices=BACKENDS, help="default: as Keras is configured"
        )

    def error(self, message):
        raise UsageError(message)

    def add_attention(
        self, default, help="a layer of this package, with options of its constructor"
    ):
        """Adds `--attention`: one, or one and more where the default is a list."""
        self.add_argument(
            "--attention",
            nargs="+" if isinstance(default, list) else None,
            default=default,
            metavar="NAME[:OPTION=VALUE,...]",
            help=help,
        )

    def add_model_size(self, dim, heads, layers=None):
        """Adds `--dim` and `--heads`, and `--layers` where it has a default."""
        if layers is not None:
            self.add_argument("--layers", type=positive, default=layers)
        self.add_argument("--dim", type=positive, default=dim, help="width")
        self.add_argument("--heads", type=positive, default=heads)

    def add_training(self, steps, batch, learning_rate, rows="sequences"):
        """Adds `--steps`, `--batch` and `--learning-rate`."""
        self.add_argument("--steps", type=positive, default=steps, help="of training")
        self.add_argument(
            "--batch", type=positive, default=batch, help=f"{rows} of a batch"
        )
        self.add_argument("--learning-rate", type=positive_float, default=learning_rate)

    def add_seed_and_verbose(self):
        """Adds `--seed` and `--verbose`."""
        self.add_argument("--seed", type=natural, default=0)
        self.add_verbose()

    def add_seeds(self, default=(0,)):
        """Adds `--seeds`, for `each_seed` and `tables.mean_and_spread`."""
        self.add_argument(
            "--seeds",
            nargs="+",
            type=natural,
            default=list(default),
            help="a training of each for each seed; several give mean and deviation",
        )

    def add_verbose(self):
        """Adds `--verbose`, by default a bar on a terminal and lines elsewhere."""
        self.add_argument(
            "--verbose",
            type=int,
            choices=(0, 1, 2),
            default=show_progress(),
            help="while training: 0 prints nothing, 1 a progress bar, 2 one line per "
            "epoch; default: 1 on a terminal, 2 elsewhere",
        )

    def add_out(self, default, contents):
        """Adds `--out`, the folder for these contents."""
        self.add_argument(
            "--out",
            type=Path,
            default=Path(default),
            metavar="FOLDER",
            help=f"for {contents}",
        )

    def add_save(self):
        """Adds `--save`, for `tables.show`."""
        self.add_argument(
            "--save",
            type=Path,
            metavar="FILE",
            help="JSON: the table, this command, versions, machine and date",
        )


def command(parse_arguments):
    """Makes a function of parsed arguments the `main(argv=None)` of its script.

    Keras uses `--backend` before the function begins, which then may import it, and the
    folders of `--save` and `--plot` exist. With `--save` among its options, the
    arguments have the words of the command line as `command`. `main` returns the
    script's exit status: 0 or what the function returns; after a `UsageError`, which it
    prints in one line, 2.
    """

    def decorate(run):
        @functools.wraps(run)
        def main(argv=None):
            script = Path(inspect.getfile(run))
            try:
                arguments = parse_arguments(argv)
                if "save" in arguments:
                    arguments.command = [
                        f"{script.parent.name}/{script.name}",
                        *(sys.argv[1:] if argv is None else argv),
                    ]
                for option in ("save", "plot"):
                    file = getattr(arguments, option, None)
                    if file is not None:
                        make_folder(Path(file).parent, f"--{option}")
                select_backend(arguments.backend)
                return run(arguments) or 0
            except UsageError as error:
                message = " ".join(str(error).split())
                print(f"{script.name}: error: {message}", file=sys.stderr)
                return 2

        return main

    return decorate


def each_seed(arguments):
    """The arguments once for each of `--seeds`, with it as `seed`."""
    for seed in arguments.seeds:
        yield argparse.Namespace(**vars(arguments), seed=seed)


def show_progress():
    """Keras' `verbose`: bars, whose control characters only a terminal understands."""
    return 1 if sys.stdout.isatty() else 2


def select_backend(backend):
    """Has Keras use this backend, or the one it is configured for."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if backend is None:
        return
    if importlib.util.find_spec(backend) is None:
        raise UsageError(f"--backend {backend}: {backend} is not installed")
    os.environ["KERAS_BACKEND"] = backend


def make_folder(folder, option="--out"):
    """Makes the folder of an option, or raises `UsageError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option}: folder {folder}: {error.strerror}") from error


def check_heads(dim, heads):
    """Raises `UsageError` if heads of one size do not make up the width."""
    if dim % heads:
        raise UsageError(
            f"--dim must be a multiple of --heads; received --dim {dim} --heads {heads}"
        )


def check_convolution(size):
    """Raises `UsageError` if a convolution of this size is none; 0 stands for none."""
    if size == 1:
        raise UsageError("--convolution must be 0, or at least 2; received 1")


def _number(convert, accept, expected):
    def parse(text):
        try:
            number = convert(text)
        except ValueError:
            number = None
        if number is None or not accept(number):
            raise argparse.ArgumentTypeError(f"must be {expected}; received {text!r}")
        return number

    return parse


positive = _number(int, lambda n: n >= 1, "a positive integer")
natural = _number(int, lambda n: n >= 0, "an integer that is not negative")
positive_float = _number(float, lambda x: 0 < x < math.inf, "a positive number")
not_negative = _number(float, lambda x: 0 <= x < math.inf, "0 or a positive number")
share = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
rate = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
