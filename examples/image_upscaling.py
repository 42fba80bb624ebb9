"""Upscales images with an encoder and a decoder with local attention.

    python examples/image_upscaling.py
    python examples/image_upscaling.py --factor 4 --attention local1d
    python examples/image_upscaling.py --data photos --size 16

The small images are the large ones' means over squares of `--factor` by `--factor`
values. As in Image Transformer (Parmar et al., 2018), the encoder sees the whole small
image, and the decoder generates the large image value by value, with attention to near
values and to the encoder. The table has bits per dimension on held-out images, the same
with another image in the encoder, and the root mean square error of one sample per
image, next to that of the small image itself. Small images, samples and originals are
written as PNG.

For names of attention see examples/image_generation.py.
"""

import sys

from command_line import (
    Parser,
    UsageError,
    command,
    each_seed,
    make_folder,
    positive,
)
from images.arguments import parse_images
from images.data import load
from tables import mean_and_spread, show


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", choices=("digits", "photos"), default="digits")
    add("--factor", type=positive, default=2, help="how much larger, per side")
    parser.add_attention(
        ["local2d", "local1d", "softmax"],
        "of the decoder: local2d, local1d, strided, fixed, softmax, or a layer with "
        "options",
    )
    return parse_images(parser, argv, steps=600, layers=2, out="runs/upscaling")


@command(parse_arguments)
def main(arguments):
    """Trains each decoder, prints the comparison and writes the images."""
    if arguments.samples:
        make_folder(arguments.out)
    data = load(arguments.data, arguments.size, arguments.levels, arguments.seeds[0])
    # Imported here because Keras reads the backend on import.
    from images.upscaling import make_model, shrink, train_and_measure

    shrink(data.test[:1], data, arguments.factor)
    names = list(dict.fromkeys(arguments.attention))
    for name in names:
        try:
            make_model(name, data, arguments)
        except ValueError as error:
            raise UsageError(f"--attention {name}: {error}") from error
    results = {}
    for name in names:
        results[name] = []
        for each in each_seed(arguments):
            print(f"== {name}, seed {each.seed}", flush=True)
            model, result = train_and_measure(name, data, each)
            results[name].append(result)
            print(f"{result['bits']:.3f} bits per dimension", flush=True)
        if arguments.samples:
            print(f"wrote {write_picture(model, name, data, each)}")
    show(*table(results), arguments)
    small = f"{data.rows // arguments.factor} x {data.columns // arguments.factor}"
    print(
        f"{arguments.steps} steps of {arguments.batch} images, from {small} to "
        f"{data.rows} x {data.columns} values of {data.levels} levels"
    )


def write_picture(model, name, data, arguments):
    """Small images, samples and originals, one row each; returns the path."""
    from images.pictures import write
    from images.upscaling import enlarge, sample, shrink

    stem = "".join(c if c.isalnum() else "_" for c in name)
    path = arguments.out / f"{stem}_x{arguments.factor}.png"
    originals = data.test[: arguments.samples]
    small = shrink(originals, data, arguments.factor)
    samples = sample(model, small, data, arguments.seed)
    write(path, [enlarge(small, data, arguments.factor), samples, originals], data)
    return path


def table(results):
    """Header and rows: the comparison, over the seeds."""
    header = ["decoder", "bits/dim", "another's small image", "error of a sample"]
    header += ["error of the small image", "parameters"]
    digits = {"bits": 3, "bits_of_another": 3, "error": 2}
    rows = [
        [
            name,
            *(mean_and_spread([each[k] for each in seeds], digits[k]) for k in digits),
            f"{seeds[0]['squares']:.2f}",
            f"{seeds[0]['parameters']:,}",
        ]
        for name, seeds in results.items()
    ]
    return header, rows


if __name__ == "__main__":
    sys.exit(main())
