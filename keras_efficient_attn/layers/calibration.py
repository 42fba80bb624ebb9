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


class Moments:
    """Number, means and covariances of vectors, head by head, summed over batches.

    Attributes:
        number: How many vectors there were.
    """

    def __init__(self):
        self.number, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, vectors):
        """Counts vectors, `(number, heads, dim)`."""
        vectors = np.asarray(ops.convert_to_numpy(vectors), "float64")
        self.number += len(vectors)
        self._sum = self._sum + vectors.sum(0)
        self._squares = self._squares + np.einsum(
            "nhd,nhe->hde", vectors, vectors, optimize=True
        )

    @property
    def mean(self):
        """`(heads, dim)`."""
        return self._sum / self.number

    @property
    def covariance(self):
        """`(heads, dim, dim)`."""
        mean = self.mean
        return self._squares / self.number - mean[:, :, None] * mean[:, None, :]
