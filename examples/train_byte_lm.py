"""Trains a byte-level language model with an attention layer of this package.

    python examples/train_byte_lm.py
    python examples/train_byte_lm.py --text enwik8 --attention softmax
    python examples/train_byte_lm.py --compare gated-delta local:window=64

The text is the Python standard library's own source, or your `--text`. Keras' progress
bar shows bits per byte. After training, windows of held-out text of 1, 4 and 16 times
the training length are scored, beside gzip and xz. The run writes `model.keras`,
`curve.csv`, `curve.png` and `result.json` to `--out`, and checkpoints for `--resume`.
`--compare` trains models of equal parameters, and also writes `curves.png`: the width
of the feed-forward networks makes up for the attention. With `--attention
adaptive-span` the layers are trimmed after each epoch, and `spans.png` is written. The
parts are in `byte_lm/`: text and batches, model, checkpoints, sampling, plot.
"""

import json
import re
import shlex
import subprocess
import sys

from command_line import (
    Parser,
    UsageError,
    check_convolution,
    command,
    natural,
    not_negative,
    positive,
)

RESIDUALS = ("pre_norm", "post_norm", "gated", "reversible")
DTYPES = ("float32", "bfloat16", "mixed_bfloat16", "float16", "mixed_float16")
# Settings that must be equal to resume a run.
FIXED = (
    "attention",
    "length",
    "layers",
    "dim",
    "heads",
    "feed_forward",
    "convolution",
    "residual",
    "steps",
    "epoch_steps",
    "batch",
    "learning_rate",
    "dtype",
    "seed",
)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_attention(
        "gated-delta",
        "any causal attention layer of the package, with options of the constructor, "
        "such as softmax:rotary_wavelength=10000",
    )
    add(
        "--compare",
        nargs="+",
        metavar="ATTENTION",
        help="train each of these on the same batches, with equal parameters, and "
        "print a table",
    )
    add("--text", metavar="FILE_OR_DIR", help="default: the standard library's source")
    add("--length", type=positive, default=512, help="bytes per row of a batch")
    parser.add_model_size(dim=128, heads=4, layers=2)
    add(
        "--feed-forward",
        type=positive,
        metavar="WIDTH",
        help="of the feed-forward networks; default: 4 times --dim",
    )
    add(
        "--convolution",
        type=natural,
        default=0,
        metavar="BYTES",
        help="that a short convolution before each attention reaches; 0: none",
    )
    add(
        "--residual",
        choices=RESIDUALS,
        default="pre_norm",
        help="reversible keeps no activations: memory is flat in --layers",
    )
    parser.add_training(steps=1000, batch=1, learning_rate=4e-3, rows="rows")
    add("--dtype", choices=DTYPES, default="float32", help="Keras' dtype policy")
    add("--seed", type=natural, default=0)
    add(
        "--epoch-steps",
        type=positive,
        default=100,
        help="steps between validations, each followed by a checkpoint",
    )
    add(
        "--test-bytes",
        type=positive,
        default=2**16,
        help="bytes of the test text to evaluate, three times, and to compress; at "
        "least two windows of 16 times --length",
    )
    add("--sample-bytes", type=positive, default=400, help="bytes to sample")
    add(
        "--temperature",
        type=not_negative,
        default=0.8,
        help="of the sample; 0 is greedy",
    )
    parser.add_out("runs/byte_lm", "the results")
    add(
        "--on-nan",
        choices=("stop", "skip"),
        default="stop",
        help="after a step that gives NaN or infinity, which changes nothing: stop, or "
        "go on with the next batch",
    )
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args(argv)
    check_convolution(arguments.convolution)
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains a model, or one of each attention of `--compare`."""
    try:
        # Imported here because Keras reads the backend on import.
        if arguments.compare:
            compare(arguments)
        else:
            from byte_lm.training import run

            run(arguments, {name: getattr(arguments, name) for name in FIXED})
    except KeyboardInterrupt:
        print("\nInterrupted; --resume goes on from the last checkpoint.")
        return 130


def compare(arguments):
    """Trains each attention in a separate process, prints a table and plots the curves.

    The processes see the same batches and do not share memory. The models have equal
    parameters.
    """
    from byte_lm.model import OPTIONS, check_attention, equal_widths
    from byte_lm.results import comparison_table, plot_curves, read_curve

    folders = {}
    for attention in arguments.compare:
        check_attention(attention, arguments.dim, arguments.heads)
        if attention in folders:
            raise UsageError(f"--compare has {attention} twice; give each once")
        # The number distinguishes names that differ in other characters only.
        name = re.sub(r"[^\w+.=-]", "_", attention)
        folders[attention] = arguments.out / f"{len(folders) + 1}-{name}"
    options = {name: getattr(arguments, name) for name in OPTIONS}
    widths = equal_widths(folders, options)
    results, curves = [], {}
    for attention, out in folders.items():
        print(f"\n== {attention}", flush=True)
        changed = {
            "compare": None,
            "attention": attention,
            "feed_forward": widths[attention],
            "out": out,
        }
        words = command_line({**vars(arguments), **changed})
        command = [sys.executable, __file__, *words]
        if subprocess.run(command).returncode:
            raise UsageError(f"--compare: this run failed: {shlex.join(command)}")
        results.append(json.loads((out / "result.json").read_text()))
        curves[attention] = read_curve(out / "curve.csv")
    print("\n" + comparison_table(results))
    plot_curves(arguments.out / "curves.png", curves, results[0])
    print(f"Wrote curves.png in {arguments.out}")


def command_line(options):
    """The command-line form of parsed options."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


if __name__ == "__main__":
    sys.exit(main())
