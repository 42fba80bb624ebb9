"""Measures Fourier's estimators: rates, and regression on correlated features.

    python research/claim_regression.py rates
    python research/claim_regression.py correlated

`rates`: squared errors, times 1,000, by the number of samples, with the theorems'
radius, and the exponent of the samples that fits them beside the theorem's. Densities
are products of semicircles, whose bias is the largest that the theorem allows; the
function is a sine with noise.
`correlated`: the paper's estimator, a product of one kernel over the features, against
Gaussian kernels, isotropic and with the covariance of the samples; also the estimator
of features whitened by this covariance. The width of each is chosen on held-out
samples. The function is a sum of sines of the correlated features, or of the
independent factors that the features are sums of. Errors are in percent of the
function's variance.
Each number is the mean, with the standard deviation, over the seeds.
"""

import sys

import folders  # noqa: F401
from claims.arguments import SEEDS
from command_line import Parser, UsageError, command, positive, rate
from tables import mean_and_spread, show

SAMPLES = {"rates": [250, 1000, 4000, 16000, 64000], "correlated": [250, 1000, 4000]}


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("part", choices=tuple(SAMPLES))
    add("--samples", type=positive, nargs="+", help="default: as on the page")
    add("--draws", type=positive, default=4, help="of samples, for each seed of rates")
    add("--dims", type=positive, nargs="+", default=[2, 4], help="of the features")
    add("--correlation", type=rate, default=0.9, help="of each pair of features")
    parser.add_seeds(SEEDS)
    parser.add_save()
    arguments = parser.parse_args(argv)
    arguments.samples = arguments.samples or SAMPLES[arguments.part]
    if arguments.part == "rates" and len(set(arguments.samples)) == 1:
        raise UsageError("--samples: rates need two sizes; received one")
    if arguments.part == "correlated" and min(arguments.samples) <= max(arguments.dims):
        raise UsageError(
            "--samples must exceed --dims; received "
            f"--samples {min(arguments.samples)} --dims {max(arguments.dims)}"
        )
    return arguments


def rates(arguments):
    """The header and the rows of the rates."""
    import numpy as np

    from claims.regression import density_error, regression_error

    cases = [
        ("density, 1 dimension", lambda *x: density_error(*x, dim=1), 2 / 3),
        ("density, 2 dimensions", lambda *x: density_error(*x, dim=2), 1 / 2),
        ("regression, 1 dimension", regression_error, 4 / 5),
    ]
    rows = []
    for name, error, exponent in cases:
        errors = []
        for seed in arguments.seeds:
            random = np.random.default_rng(seed)
            errors.append(
                [
                    np.mean([error(random, size) for _ in range(arguments.draws)])
                    for size in arguments.samples
                ]
            )
        sizes, logs = np.log(arguments.samples), np.log(errors)
        slopes = [np.polyfit(sizes, own, 1)[0] for own in logs]
        cells = [mean_and_spread(x, 2) for x in 1000 * np.transpose(errors)]
        rows.append([name, *cells, mean_and_spread(slopes, 2), f"{-exponent:.2f}"])
    return ["estimator", *arguments.samples, "exponent", "theorem"], rows


def correlated(arguments):
    """The header and the rows of regression on correlated features."""
    import numpy as np

    from claims.regression import FUNCTIONS, KERNELS, correlated_errors

    rows = {function: [] for function in FUNCTIONS}
    for dim in arguments.dims:
        for size in arguments.samples:
            draws = [np.random.default_rng(seed) for seed in arguments.seeds]
            errors = 100 * np.array(
                [correlated_errors(x, size, dim, arguments.correlation) for x in draws]
            )
            for column, function in enumerate(FUNCTIONS):
                cells = [mean_and_spread(x, 1) for x in errors[..., column].T]
                rows[function].append([function, dim, size, *cells])
    header = ["function of", "features", "samples", *KERNELS]
    return header, [row for own in rows.values() for row in own]


PARTS = {"rates": rates, "correlated": correlated}


@command(parse_arguments)
def main(arguments):
    """Prints the table."""
    show(*PARTS[arguments.part](arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
