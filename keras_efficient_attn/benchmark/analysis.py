"""Slopes and crossovers of curves of time or memory over length."""

import math

import numpy as np


def log_log_slope(series):
    """Least-squares slope of log value over log length.

    Args:
        series: Dict of lengths to values; values of 0 are left out.

    Returns:
        A float, or `None` for fewer than two points.

    Example:

    >>> from keras_efficient_attn.benchmark import log_log_slope
    >>> round(log_log_slope({512: 1.0, 1024: 4.0, 2048: 16.0}), 6)
    2.0
    """
    points = [(math.log(n), math.log(y)) for n, y in series.items() if y > 0]
    if len(points) < 2:
        return None
    return float(np.polyfit(*np.transpose(points), 1)[0])


def crossover(baseline, series):
    """The length from which `series` stays below `baseline`.

    Args:
        baseline: Dict of lengths to values.
        series: Dict of lengths to values. Lengths missing from either dict are ignored.

    Returns:
        `"≤ 512"` if `series` is below from the first common length on; `"> 4096"` if it
        is not below at the last; otherwise, as `"1234"`, the length where straight
        lines between the logarithms cross. `None` without a common length.
    """
    lengths = sorted(set(baseline) & set(series))
    if not lengths:
        return None
    ratios = [math.log(series[n] / baseline[n]) for n in lengths]
    if ratios[-1] >= 0:
        return f"> {lengths[-1]}"
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=None)
    if last is None:
        return f"≤ {lengths[0]}"
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    before, after = math.log(lengths[last]), math.log(lengths[last + 1])
    return f"{math.exp(before + share * (after - before)):.0f}"
