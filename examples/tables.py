"""Tables of results, as Markdown."""

import statistics


def mean_and_spread(values, digits):
    """`"mean ± standard deviation"` of one number or more; without the latter, of one.

    The deviation is that of a sample, divided by n − 1.
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def markdown(header, rows):
    """The table of these cells, without a newline at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
