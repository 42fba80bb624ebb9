"""Images side by side, as PNG."""

import numpy as np
from matplotlib.image import imsave

# Pixels of the file for each pixel of an image.
ZOOM = 6


def write(path, rows_of_images, images):
    """Writes rows of images, each of integers `(count, rows · columns)`."""
    sheet = np.concatenate([_row(row, images) for row in rows_of_images], axis=0)
    sheet = sheet.repeat(ZOOM, 0).repeat(ZOOM, 1) / (images.levels - 1)
    if images.channels == 1:
        sheet = np.concatenate([sheet] * 3, axis=-1)
    imsave(path, sheet.astype("float32"))


def _row(values, images):
    pixels = images.columns // images.channels
    shape = (len(values), images.rows, pixels, images.channels)
    framed = np.pad(np.reshape(values, shape), [(0, 0), (0, 1), (0, 1), (0, 0)])
    return np.concatenate(list(framed), axis=1)
