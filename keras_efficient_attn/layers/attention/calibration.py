"""Iterates over calibration data, batch by batch."""

import itertools

import numpy as np
from keras import ops


def calibration_batches(argument, data):
    """Each batch of an array, or of an iterable, with a mask.

    Args:
        argument: Name of the argument that holds the data, for errors.
        data: An array `(batch, length, dim)`, or an iterable of batches, each an array
            or a pair of an array and a boolean mask `(batch, length)`.

    Yields:
        `(x, mask)`, the mask as a NumPy array.

    Raises:
        ValueError: If a batch is of another kind.
    """
    for batch in [data] if hasattr(data, "shape") else data:
        x, mask = batch if isinstance(batch, tuple | list) else (batch, None)
        shape = tuple(getattr(x, "shape", ()))
        mask = np.ones(shape[:2]) if mask is None else ops.convert_to_numpy(mask)
        if len(shape) != 3 or mask.shape != shape[:2]:
            raise ValueError(
                f"A batch of `{argument}` must be an array (batch, length, dim), or a "
                "pair of such an array and a mask (batch, length). Received: shape "
                f"{shape}, mask of shape {mask.shape}"
            )
        yield x, mask.astype("bool")


def paired_batches(query, data):
    """Each batch of queries, with the batch of keys that they attend to.

    Args:
        query: As `data` of `calibration_batches`; `None` means `data`.
        data: As for `calibration_batches`.

    Yields:
        Two pairs of arrays and masks.

    Raises:
        ValueError: If a batch has the wrong type, or the two yield different numbers of
            batches.
    """
    keys = calibration_batches("data", data)
    if query is None:
        yield from ((batch, batch) for batch in keys)
        return
    queries = calibration_batches("query", query)
    for queries_batch, keys_batch in itertools.zip_longest(queries, keys):
        if queries_batch is None or keys_batch is None:
            raise ValueError(
                "`query` must have as many batches as `data`. Received: "
                f"{'more' if keys_batch is None else 'fewer'} batches"
            )
        yield queries_batch, keys_batch
