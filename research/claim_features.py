"""Measures how well feature maps estimate exp(q·k), by their number of features.

    python research/claim_features.py

Queries and keys are normal, scaled so that their logits have the standard deviation of
`--logits`. Each map makes weights of the keys for each query, and rows are divided by
their sums. The table has the relative error of the outputs for normal values, against
softmax: mean and standard deviation over the seeds. The maps of Taylor and of (1 +
x/n)ⁿ have C(d + n, n) features of order n; random maps have as many, but hyperbolic
ones, whose number is even, one fewer where it is odd. Odd orders may give negative
weights, so that a row's sum may be near 0.
"""

import math
import sys

import folders  # noqa: F401
from claims.arguments import SEEDS
from command_line import Parser, command, positive, positive_float
from tables import mean_and_spread, show

ORDERS = (1, 2, 3, 4)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--dim", type=positive, default=8, help="of a head")
    add("--keys", type=positive, default=256)
    add("--queries", type=positive, default=256)
    add("--logits", type=positive_float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_seeds(SEEDS)
    parser.add_save()
    return parser.parse_args(argv)


def maps(dim, order, seed):
    """Feature maps of one number of features, by name: functions of queries or keys."""
    from keras_efficient_attn.ops import feature_maps
    from keras_efficient_attn.ops.common import random_features

    size = math.comb(dim + order, order)

    def random(hyperbolic):
        rows = size // 2 if hyperbolic else size
        draws = random_features.gaussian_blocks(rows, dim, seed)
        projection = random_features.random_projection(*draws)
        return lambda x: feature_maps.positive_random_features(
            x, projection, hyperbolic=hyperbolic
        )

    return {
        "Taylor": lambda x: feature_maps.taylor_features(x, order),
        "(1 + x/n)ⁿ": lambda x: feature_maps.power_features(x, order),
        "FAVOR+": random(hyperbolic=False),
        "hyperbolic": random(hyperbolic=True),
    }


def weights(feature_map, query, key):
    """The weights of a map, in float64, divided by the sums of their rows."""
    import numpy as np
    from keras import ops

    def features(x):
        found = feature_map(ops.convert_to_tensor(x))
        values, log_scale = map(ops.convert_to_numpy, found)
        log_scale = log_scale.astype("float64")
        return values.astype("float64") * np.exp(log_scale)[..., None]

    kernel = features(query) @ features(key).T
    return kernel / kernel.sum(axis=-1, keepdims=True)


def measure(order, logits, seed, arguments):
    """The relative error of the outputs, by the name of the map."""
    import numpy as np

    random = np.random.default_rng(seed)
    # The logits are sums of `dim` products.
    scale = math.sqrt(logits) / arguments.dim**0.25
    sizes = (arguments.queries, arguments.dim), (arguments.keys, arguments.dim)
    query, key = (scale * random.normal(size=size).astype("float32") for size in sizes)
    value = random.normal(size=(arguments.keys, arguments.dim))
    exact = np.exp(query.astype("float64") @ key.T)
    expected = exact / exact.sum(axis=-1, keepdims=True) @ value
    return {
        name: np.linalg.norm(weights(each, query, key) @ value - expected)
        / np.linalg.norm(expected)
        for name, each in maps(arguments.dim, order, seed).items()
    }


@command(parse_arguments)
def main(arguments):
    """Prints the table."""
    rows = []
    for logits in arguments.logits:
        for order in ORDERS:
            found = [measure(order, logits, s, arguments) for s in arguments.seeds]
            features = math.comb(arguments.dim + order, order)
            cells = [mean_and_spread([x[name] for x in found], 3) for name in found[0]]
            rows.append([f"{logits:g}", order, features, *cells])
    show(["logits", "order", "features", *found[0]], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
