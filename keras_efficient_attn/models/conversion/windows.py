"""Choosing the windows of layers: the least error that a mean window allows."""

import math
import numbers

import numpy as np

from keras_efficient_attn.models.conversion.calibration import (
    calibrate_layers,
    recorded_inputs,
)
from keras_efficient_attn.models.conversion.recording import (
    recorded_calls,
    relative_error,
    run,
    valid_rows,
)

SMALLEST_WINDOW = 1
# Of the budget: smaller windows would save little that others can use.
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


def choose_windows(budget, backbone, places, layers, inputs):
    """Gives layers the windows of least error, and fits them to data.

    Each layer is tried alone, on what the original reads in its place, with windows
    that are powers of two.

    Args:
        budget: The largest mean of the windows.
        backbone: The original.
        places: List of `Place`, in the original.
        layers: The layers of a copy that stand there; what they have besides the
            projections changes.
        inputs: List of batches.

    Returns:
        The windows, a list.

    Raises:
        ValueError: If the errors are no numbers.
    """
    read = recorded_inputs(backbone, places, inputs)
    calls = _calls(backbone, places, inputs)
    total = math.floor(budget * len(layers))
    smallest = SMALLEST_WINDOW
    while 2 * smallest <= SMALLEST_SHARE * budget:
        smallest *= 2
    largest = total - (len(layers) - 1) * smallest
    errors = []
    for place, layer, found, made in zip(places, layers, read, calls, strict=True):
        if not layer.calibrates_beyond_window:
            calibrate_layers([layer], [found])
        rows = [valid_rows(place, call) for call in made]
        old = [call.output for call in made]
        by_window = {}
        for window in _candidates(smallest, largest, layer, found):
            _set_window(layer, window, found)
            new = [run(layer, *call.args, **call.kwargs) for call in made]
            error = relative_error(old, new, rows) ** 2
            by_window[window] = math.inf if math.isnan(error) else error
        errors.append(by_window)
    windows = least_error(errors, total)
    for layer, window, found in zip(layers, windows, read, strict=True):
        _set_window(layer, window, found)
    return windows


def least_error(errors, total):
    """The windows whose errors have the least sum, by dynamic programming.

    Args:
        errors: For each layer a dict, of its possible windows to its errors.
        total: The largest sum of the windows.

    Returns:
        The windows, a list. Of equal sums of errors, one with the least windows.

    Raises:
        ValueError: If no choice has a finite error.
    """
    # Of the layers so far: the least error, by the sum of their windows.
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


def _calls(backbone, places, inputs):
    """The calls of the attention layers, a list for each."""
    calls = [[] for _ in places]
    for batch in inputs:
        found = recorded_calls(backbone, [place.layer for place in places], batch)
        for kept, more in zip(calls, found, strict=True):
            kept += more
    return calls


def _candidates(smallest, largest, layer, found):
    """The windows to try, until one holds all that a query sees."""
    longest = max(_longest(query, mask) for query, _, mask, _ in found)
    windows = [smallest]
    while windows[-1] < longest and 2 * windows[-1] <= largest:
        windows.append(2 * windows[-1])
    # Such a window leaves no key beyond it to fit to.
    if layer.calibrates_beyond_window and len(windows) > 1 and windows[-1] >= longest:
        windows.pop()
    return windows


def _longest(query, mask):
    """The most positions from the first to the last that is no padding."""
    if mask is None:
        return query.shape[1]
    positions = [np.flatnonzero(row) for row in mask if row.any()]
    return max((int(np.ptp(kept)) + 1 for kept in positions), default=0)


def _set_window(layer, window, found):
    """Gives a layer another window, and fits to data what depends on it."""
    layer.window = window
    if layer.calibrates_beyond_window:
        calibrate_layers([layer], [found])
