"""The command: arguments in, a table and files out."""

import argparse
import importlib
import importlib.util
import math
import signal
import sys
from pathlib import Path

import keras

from keras_efficient_attn.benchmark.compare import run
from keras_efficient_attn.benchmark.records import Comparison, time_ratios
from keras_efficient_attn.benchmark.report import (
    read_json,
    slower,
    table,
    write_csv,
    write_json,
    write_plots,
)
from keras_efficient_attn.benchmark.settings import BACKENDS, DTYPES, MODES, Settings
from keras_efficient_attn.layers import attention_names


class UsageError(ValueError):
    """A bad argument, said in one line."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without the usage."""

    def error(self, message):
        raise UsageError(message)


def parse_arguments(argv):
    parser = Parser(
        prog="python -m keras_efficient_attn.benchmark",
        usage="%(prog)s [options]",
        description="Which attention is fastest on this machine, at your shape.",
        epilog="A length is given up for a contestant, and longer ones are skipped, "
        "when it runs out of time or memory; the table says so.",
    )
    add = parser.add_argument
    add_layers_and_shape(parser)
    add(
        "--mode",
        choices=MODES,
        default=Settings.mode,
        help="forward; train: with the gradients of inputs and weights; decode: one "
        "position at a time after N others; default: %(default)s",
    )
    add("--causal", action="store_true", help="as decode and --model always are")
    add("--backend", choices=BACKENDS, help="default: as Keras is configured")
    add_number(parser, "--repeats", Settings.repeats)
    add(
        "--time-limit",
        type=_positive_float,
        default=Settings.time_limit,
        metavar="SECONDS",
        help="computing time per contestant and length, compilation included; "
        "default: %(default)s",
    )
    add("--out", type=Path, metavar="DIR", help="folder for CSV, JSON and PNG files")
    add_files(parser, "a file of --save or --out", "in times of each run's matmul")
    add(
        "--model",
        action="store_true",
        help="a small language model, not a layer; needs the extra hub",
    )
    return vars(parser.parse_args(argv))


def add_layers_and_shape(parser):
    """Adds `--layers`, `--import`, `--lengths`, sizes and `--dtype` to a parser."""
    add = parser.add_argument
    add(
        "--layers",
        nargs="+",
        default=list(Settings.layers),
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{', '.join(attention_names())} with options of "
        "the constructor: performer:feature_map=favor+,num_features=64",
    )
    add(
        "--import",
        dest="modules",
        nargs="+",
        type=_module,
        default=[],
        metavar="MODULE",
        help="modules of your own that register layers",
    )
    add(
        "--lengths",
        nargs="+",
        type=_positive,
        default=list(Settings.lengths),
        metavar="N",
        help=f"default: {' '.join(map(str, Settings.lengths))}",
    )
    add_number(parser, "--heads", Settings.heads)
    add_number(parser, "--head-dim", Settings.head_dim)
    add_number(parser, "--batch", Settings.batch)
    add(
        "--dtype",
        choices=DTYPES,
        default=Settings.dtype,
        metavar="POLICY",
        help=f"Keras' dtype policy: {', '.join(DTYPES)}; default: %(default)s",
    )


def add_files(parser, written, unit):
    """Adds `--save` and `--against`.

    Args:
        parser: The parser.
        written: What `--against` reads.
        unit: In what the times of both runs count.
    """
    add = parser.add_argument
    add("--save", type=Path, metavar="FILE", help="JSON file for `--against`")
    add(
        "--against",
        type=Path,
        metavar="FILE",
        help=f"{written}: says what takes over a tenth longer than there, {unit}",
    )


def add_number(parser, option, default):
    """Adds an option that is a positive integer."""
    parser.add_argument(
        option,
        type=_positive,
        default=default,
        metavar="N",
        help="default: %(default)s",
    )


def main(argv=None):
    """Runs the command; returns its exit status."""
    try:
        arguments = parse_arguments(argv)
        out, save, against = map(arguments.pop, ("out", "save", "against"))
        settings = make_settings(arguments)
        before = prepare_files(settings, save, against)
        if out is not None:
            make_folder(out, "--out")
    except ValueError as error:
        return refuse("benchmark", error)
    # However the run ends, its measurements are shown and written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    comparison = run(settings, progress=_progress_bar)
    print("\n" + table(comparison))
    if out is not None:
        _write(comparison, out)
    if save is not None:
        write_json(comparison, save)
    if before is not None:
        print("\n" + slower(comparison, before))
    return 0 if comparison.complete else 130


def make_settings(arguments):
    """The `Settings` for parsed arguments, as a dict; it checks them."""
    # The modules of `--import` are imported: they have registered their layers.
    arguments = {name: arguments[name] for name in arguments if name != "modules"}
    settings = Settings(**arguments)
    if importlib.util.find_spec(settings.backend) is None:
        raise UsageError(
            f"--backend {settings.backend}: {settings.backend} is not installed"
        )
    return settings


def prepare_files(settings, save, against):
    """Makes the folder of `--save`, and reads the file of `--against`.

    Returns:
        The `Comparison` in the file, whose shape is that of `settings`; or `None`.
    """
    before = None
    if against is not None:
        before = read_json(against)
        time_ratios(Comparison(settings, [], {}), before)
    if save is not None:
        make_folder(save.parent, "--save")
    return before


def make_folder(folder, option):
    """Makes the folder of an option, such as `"--out"`, or raises `UsageError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option}: folder {folder}: {error.strerror}") from error


def refuse(command, error):
    """Prints the error of an argument in one line; returns the exit status."""
    print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _progress_bar(steps):
    # Only a terminal understands the control characters of a bar.
    verbose = 1 if sys.stdout.isatty() else 2
    return keras.utils.Progbar(steps, unit_name="call", verbose=verbose)


def _write(comparison, out):
    write_csv(comparison, out / "benchmark.csv")
    write_json(comparison, out / "benchmark.json")
    written = ["benchmark.csv", "benchmark.json"]
    try:
        written += [path.name for path in write_plots(comparison, out)]
    except ImportError:
        print("No pictures: matplotlib is not installed.")
    print(f"In {out}: {', '.join(written)}")


def _module(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"cannot import {name}: {error}") from error


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


_positive = _number(int, lambda n: n >= 1, "a positive integer")
_positive_float = _number(float, lambda x: 0 < x < math.inf, "a positive number")
