"""Models images pixel by pixel with sparse and local attention.

    python examples/image_generation.py
    python examples/image_generation.py --data photos --attention local2d softmax
    python examples/image_generation.py --data cifar10 --attention strided

Each attention trains on the same images, and a table compares bits per dimension on
held-out images. Samples, and completions of held-out images from the first half of
their pixels in the model's order, mostly the upper half, are written as PNG.

The images are scikit-learn's handwritten digits, patches of its two photographs, or
CIFAR-10, which is downloaded. `--data periodic` and `--data text` show which sparse
pattern suits which data: rows that repeat, or text, which does not repeat.

Names of attention: local2d (rectangles of a quarter of the image, with a halo of a
quarter), local2d-blocks (the same, with pixels ordered rectangle by rectangle, as in
Image Transformer, instead of row by row), local1d (two rows), strided and fixed (with
the length of a row as stride), softmax; or any layer of this package with options of
its constructor.
"""

import statistics
import sys

from command_line import Parser, UsageError, command, each_seed, make_folder
from images.arguments import parse_images
from images.data import SOURCES, load
from tables import mean_and_spread, show


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", choices=SOURCES, default="digits")
    parser.add_attention(
        ["local2d", "strided", "fixed", "softmax"],
        "local2d, local2d-blocks, local1d, strided, fixed, softmax, or a layer with "
        "options",
    )
    return parse_images(parser, argv, steps=400, layers=3, out="runs/images")


@command(parse_arguments)
def main(arguments):
    """Trains each attention, prints the comparison and writes the images."""
    if arguments.samples:
        make_folder(arguments.out)
    data = load(arguments.data, arguments.size, arguments.levels, arguments.seeds[0])
    # Imported here because Keras reads the backend on import.
    from images.model import make_model, order_of, train_and_measure

    names = list(dict.fromkeys(arguments.attention))
    try:
        for name in names:
            make_model(name, data, arguments)
            order_of(name, data)
    except ValueError as error:
        raise UsageError(f"--attention {name}: {error}") from error
    print(
        f"{arguments.data}: {len(data.train)} images of {data.rows} x {data.columns} "
        f"values, {data.levels} levels",
        flush=True,
    )
    results = {}
    for name in names:
        results[name] = []
        for each in each_seed(arguments):
            print(f"\n== {name}, seed {each.seed}", flush=True)
            model, result = train_and_measure(name, data, each)
            results[name].append(result)
            print(f"{result['bits']:.3f} bits per dimension", flush=True)
        if arguments.samples and data.channels:
            for path in write_pictures(model, name, data, each):
                print(f"wrote {path}")
    show(*table(results), arguments)
    print(
        f"{arguments.steps} steps of {arguments.batch} images of {data.length} values; "
        f"{result['images']} held-out images"
    )


def write_pictures(model, name, data, arguments):
    """Writes samples, and completions below their originals; returns paths."""
    from images.model import complete, order_of
    from images.pictures import write

    stem = "".join(c if c.isalnum() else "_" for c in name)
    paths = [
        arguments.out / f"{stem}_{kind}.png" for kind in ("samples", "completions")
    ]
    originals = data.test[: arguments.samples]
    rest = data, order_of(name, data), arguments.seed
    write(paths[0], [complete(model, originals, 0, *rest)], data)
    half = data.length // 2
    write(paths[1], [originals, complete(model, originals, half, *rest)], data)
    return paths


def table(results):
    """Header and rows: the comparison, over the seeds."""
    rows = [
        [
            name,
            mean_and_spread([result["bits"] for result in seeds], 3),
            f"{statistics.median(each['seconds_per_step'] for each in seeds):.3f}",
            f"{seeds[0]['parameters']:,}",
        ]
        for name, seeds in results.items()
    ]
    return ["attention", "bits/dim", "s/step", "parameters"], rows


if __name__ == "__main__":
    sys.exit(main())
