"""Chooses the windows of layers: the least error within a mean window."""

import math
import numbers

import numpy as np

from keras_efficient_attn.models.conversion.fit import fit
from keras_efficient_attn.models.conversion.trace import (
    relative_error,
    run,
    valid_rows,
)

SMALLEST_WINDOW = 1
# Share of the budget; smaller windows would free little for other layers.
SMALLEST_SHARE = 1 / 4


def check_window_budget(budget, layers, calibrate):
    """Raises `ValueError` if the arguments do not go together."""
    if budget is None:
        return
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not number or not SMALLEST_WINDOW <= budget < math.inf:
        raise ValueError(
            "`window_budget` must be None or the largest mean of the windows, a "
            f"number of at least {SMALLEST_WINDOW}. Received: window_budget={budget!r}"
        )
    if isinstance(layers, str) and layers == "auto":
        raise ValueError(
            "`window_budget` is a mean over the layers that are replaced, which "
            "layers='auto' is yet to choose, by errors that depend on their windows: "
            "it excludes `window_budget`. Received: "
            f"layers={layers!r}, window_budget={budget!r}"
        )
    if calibrate is None:
        raise ValueError(
            "`window_budget` measures errors on the data in `calibrate`. Received: "
            f"window_budget={budget!r}, calibrate=None"
        )


def choose_windows(budget, adapters, sites, records, effect=None):
    """Gives layers the windows of least error, and fits them to data.

    Each layer is tried alone, on the original's inputs, with windows that are powers of
    two.

    Args:
        budget: The maximum mean of the windows.
        adapters: The adapters of a copy; their kernels change.
        sites: The `AttentionSite`s in the original, in the same order.
        records: From `trace` of the original, in the same order.
        effect: Called with a list of an index of `adapters`, gives what to count for
            its window in place of the square of the error of the layer's output.
            Defaults to `None`: that square.

    Returns:
        The windows, a list.

    Raises:
        ValueError: If the errors are not numbers.
    """
    total = math.floor(budget * len(adapters))
    smallest = SMALLEST_WINDOW
    while 2 * smallest <= SMALLEST_SHARE * budget:
        smallest *= 2
    largest = total - (len(adapters) - 1) * smallest
    errors = []
    for index, adapter in enumerate(adapters):
        site, calls = sites[index], records[index]
        if not adapter.kernel.calibrates_beyond_window:
            fit([adapter], [site], [calls])
        rows = [valid_rows(site, call) for call in calls]
        old = [call.output for call in calls]
        by_window = {}
        for window in _candidates(smallest, largest, adapter.kernel, calls, rows):
            _set_window(window, adapter, site, calls)
            if effect is None:
                new = [run(adapter, *call.args, **call.kwargs) for call in calls]
                error = relative_error(old, new, rows) ** 2
            else:
                error = effect([index])
            by_window[window] = math.inf if math.isnan(error) else error
        errors.append(by_window)
    windows = least_error(errors, total)
    for window, adapter, site, calls in zip(
        windows, adapters, sites, records, strict=True
    ):
        _set_window(window, adapter, site, calls)
    return windows


def least_error(errors, total):
    """The windows whose errors have the least sum, by dynamic programming.

    Args:
        errors: For each layer a dict from possible windows to errors.
        total: The largest sum of the windows.

    Returns:
        The windows, a list: for equal sums of errors, the smallest windows.

    Raises:
        ValueError: If no choice has a finite error.
    """
    # The least error of the layers so far, by the sum of their windows.
    least = np.full(total + 1, math.inf)
    least[0] = 0.0
    last = []
    for by_window in errors:
        tried = np.full((len(by_window), total + 1), math.inf)
        for row, (window, error) in zip(tried, by_window.items(), strict=True):
            row[window:] = least[: max(total + 1 - window, 0)] + error
        last.append(np.array(list(by_window))[tried.argmin(0)])
        least = tried.min(0)
    if not np.isfinite(least).any():
        raise ValueError(
            "The errors of the layers on the data in `calibrate` are no numbers, and "
            "`window_budget` has nothing to choose by."
        )
    left, chosen = int(least.argmin()), []
    for windows in reversed(last):
        chosen.append(int(windows[left]))
        left -= chosen[-1]
    return chosen[::-1]


def _candidates(smallest, largest, kernel, calls, rows):
    """The windows to try, up to one that holds all keys that a query sees."""
    longest = max(map(_longest, calls, rows))
    windows = [smallest]
    while windows[-1] < longest and 2 * windows[-1] <= largest:
        windows.append(2 * windows[-1])
    # Such a window leaves no key beyond it to fit.
    if kernel.calibrates_beyond_window and len(windows) > 1 and windows[-1] >= longest:
        windows.pop()
    return windows


def _longest(call, mask):
    """The largest span from the first to the last position that is not padding."""
    if mask is None:
        return call.query.shape[1]
    positions = [np.flatnonzero(row) for row in mask if row.any()]
    return max((int(np.ptp(kept)) + 1 for kept in positions), default=0)


def _set_window(window, adapter, site, calls):
    """Sets a kernel's window and refits the parts that depend on it."""
    adapter.kernel.window = window
    if adapter.kernel.calibrates_beyond_window:
        fit([adapter], [site], [calls])
