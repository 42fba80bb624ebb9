"""Classifies small images with attention layers of this package, and with softmax.

    python examples/image_classification.py
    python examples/image_classification.py --attention fourier:radius_per=dimension
    python examples/image_classification.py --dataset cifar10 --patch 4 --layers 6

A vision Transformer like DeiT, on scikit-learn's handwritten digits, without a
download; `--dataset mnist` and `cifar10` use `keras.datasets`. Each attention trains
once for each seed: by default Fourier with the layer's defaults, and as in its paper. A
table compares accuracy and the distance between the heads of a layer, its mean and its
variance; a larger distance means less redundant heads. A plot of the attention is
written to `--out`.
"""

import sys

from command_line import (
    Parser,
    command,
    make_folder,
    positive,
    positive_float,
    rate,
)
from image_classes.data import DATASETS, load
from tables import mean_and_spread, show

# Of published models; that of DeiT-tiny (Touvron et al., 2021, table 1) sees images of
# 224 by 224 pixels, in patches of 16.
SIZES = {"deit-tiny": ["--patch=16", "--dim=192", "--heads=3", "--layers=12"]}

# The form of FourierFormer's paper, with its radius for images.
PAPER = "fourier:radius_per=layer,initial_radius=1.0"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_attention(["fourier", PAPER])
    add("--baseline", default="softmax", metavar="NAME", help="what to compare with")
    add("--dataset", choices=DATASETS, default="digits")
    add("--patch", type=positive, default=2, help="pixels on a side of a patch")
    parser.add_model_size(dim=64, heads=4, layers=4)
    add(
        "--size",
        choices=SIZES,
        help="of a published model: its --patch, --dim, --heads and --layers",
    )
    add("--dropout", type=rate, default=0.1)
    add("--epochs", type=positive, default=20)
    add("--batch", type=positive, default=64, help="images of a batch")
    add("--learning-rate", type=positive_float, default=2e-3)
    parser.add_seeds((0, 1, 2))
    parser.add_verbose()
    parser.add_save()
    parser.add_out("runs/image_classes", "the picture")
    arguments = parser.parse_args(argv)
    if arguments.size is None:
        return arguments
    # Options that are given override those of the size.
    given = sys.argv[1:] if argv is None else argv
    return parser.parse_args([*SIZES[arguments.size], *given])


@command(parse_arguments)
def main(arguments):
    """Trains each attention, prints the comparison and plots the attention."""
    images = load(arguments.dataset)
    make_folder(arguments.out)
    picture = arguments.out / "attention.png"
    # Imported here because Keras reads the backend on import.
    from image_classes.model import build_model
    from image_classes.pictures import write_maps
    from image_classes.training import train_and_measure

    train = images.train[0]
    arguments.steps = arguments.epochs * -(-len(train) // arguments.batch)
    names = list(dict.fromkeys([*arguments.attention, arguments.baseline]))
    for name in names:
        build_model(name, train.shape[1:], images.classes, arguments)
    results = []
    for name in names:
        print(f"== {name}", flush=True)
        results.append(train_and_measure(name, images, arguments))
    show(*table(results), arguments)
    print(
        f"{len(arguments.seeds)} seeds of {arguments.epochs} epochs over "
        f"{len(images.train[1]):,} images; {len(images.test[1]):,} held-out images; "
        f"chance {1 / images.classes:.1%}"
    )
    write_maps(results, picture)
    print(f"Attention of a held-out image: {picture}")


def table(results):
    """Header and rows: the comparison over the seeds; distances are means of layers."""
    header = ["attention", "accuracy, %", "distance between heads", "its variance"]
    header += ["training s", "parameters"]
    rows = []
    for result in results:
        distances, variances = result["distances"].mean(1).T
        rows.append(
            [
                result["attention"],
                mean_and_spread(100 * result["accuracies"], 1),
                mean_and_spread(distances, 3),
                mean_and_spread(variances, 3),
                mean_and_spread(result["seconds"], 1),
                f"{result['parameters']:,}",
            ]
        )
    return header, rows


if __name__ == "__main__":
    sys.exit(main())
