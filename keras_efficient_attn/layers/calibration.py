"""What the layers that can be calibrated to data have in common."""

import numpy as np
from keras import ops


def calibration_batches(argument, data):
    """Each batch of an array, or of an iterable, with a mask.

    Args:
        argument: Name of the argument that holds the data, for errors.
        data: An array `(batch, length, dim)`, or an iterable of batches, each such an
            array or a pair of it and a boolean `(batch, length)`.

    Yields:
        `(x, mask)`, the mask as a NumPy array.

    Raises:
        ValueError: If a batch is none of these.
    """
    for batch in [data] if hasattr(data, "shape") else data:
        x, mask = batch if isinstance(batch, tuple | list) else (batch, None)
        shape = tuple(getattr(x, "shape", ()))
        mask = np.ones(shape[:2]) if mask is None else ops.convert_to_numpy(mask)
        if len(shape) != 3 or mask.shape != shape[:2]:
            raise ValueError(
                f"A batch of `{argument}` must be an array (batch, length, dim) or a "
                "pair of it and a mask (batch, length). Received: shape "
                f"{shape}, mask of shape {mask.shape}"
            )
        yield x, mask.astype("bool")
