"""What the examples' command lines have in common."""

import argparse
import functools
import importlib.util
import inspect
import math
import os
import sys
from pathlib import Path

from byte_lm.errors import UsageError

BACKENDS = ("tensorflow", "jax", "torch")


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without the usage."""

    def error(self, message):
        raise UsageError(message)


def one_line_errors(main):
    """Has a script's `main(argv)` end with one line and status 2 at a `UsageError`."""

    @functools.wraps(main)
    def wrapped(argv=None):
        try:
            return main(argv)
        except UsageError as error:
            script = Path(inspect.getfile(main)).name
            message = " ".join(str(error).split())
            print(f"{script}: error: {message}", file=sys.stderr)
            return 2

    return wrapped


def select_backend(backend):
    """Has Keras use this backend, or the one it is configured for."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if backend is None:
        return
    if importlib.util.find_spec(backend) is None:
        raise UsageError(f"--backend {backend}: {backend} is not installed")
    os.environ["KERAS_BACKEND"] = backend


def make_folder(folder):
    """Makes the folder of `--out`, or raises `UsageError`."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error


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
at_least_one = _number(float, lambda x: 1 <= x < math.inf, "a number of at least 1")
not_negative = _number(float, lambda x: 0 <= x < math.inf, "0 or a positive number")
