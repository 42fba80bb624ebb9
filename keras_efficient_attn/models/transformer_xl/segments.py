"""Contiguous segments of texts, for models that carry a memory between batches."""

import keras
import numpy as np


class Segments(keras.utils.PyDataset):
    """Batches whose rows continue the rows of the previous batch.

    A text is cut into `batch_size` equal pieces, each treated as a document. Documents
    of any length are assigned to rows in order, each to the row that has read least.
    The last segment of a document is padded, with weight 0.

    Args:
        tokens: The text, integers `(length,)`, or a list of such arrays: documents.
            The last token of a document is only predicted, not read.
        batch_size: Rows per batch.
        length: Positions per segment.
        **kwargs: Arguments of `keras.utils.PyDataset`.

    Yields:
        `(inputs, targets, weights)`: a dict of `token_ids`, `(batch_size, length)`,
        and `reset`, `(batch_size,)`, true where a document begins; the next tokens;
        and weights, 1 for real targets and 0 at padding, both `(batch_size, length)`.

    Raises:
        ValueError: If there is no batch, or an argument is invalid.

    Example:

    >>> import numpy as np
    >>> from keras_efficient_attn.models import Segments
    >>> data = Segments(np.arange(21), batch_size=2, length=5)
    >>> inputs, targets, weights = data[1]
    >>> inputs["token_ids"]
    array([[ 5,  6,  7,  8,  9],
           [15, 16, 17, 18, 19]], dtype=int32)
    """

    def __init__(self, tokens, batch_size, length, **kwargs):
        super().__init__(**kwargs)
        for argument, received in (("batch_size", batch_size), ("length", length)):
            if not isinstance(received, int) or received < 1:
                raise ValueError(
                    f"`{argument}` must be a positive integer. Received: "
                    f"{argument}={received!r}"
                )
        self.batch_size = batch_size
        self.length = length
        documents = tokens if isinstance(tokens, list | tuple) else None
        if documents is None:
            if len(np.shape(tokens)) != 1:
                raise ValueError(
                    "`tokens` must be one row of integers, or a list of them. "
                    f"Received: tokens.shape={np.shape(tokens)}"
                )
            documents = _equal_pieces(np.asarray(tokens), batch_size)
        self._rows = [[] for _ in range(batch_size)]
        for document in documents:
            document = np.asarray(document)
            # For each segment: its document and its start in the document.
            segments = [
                (document, start) for start in range(0, len(document) - 1, length)
            ]
            min(self._rows, key=len).extend(segments)
        if not self._rows[0]:
            raise ValueError(
                "`tokens` must hold two tokens for each row of a batch, at least. "
                f"Received: {sum(map(len, documents))} tokens for "
                f"batch_size={batch_size}"
            )

    def __len__(self):
        return max(map(len, self._rows))

    def __getitem__(self, index):
        shape = (self.batch_size, self.length)
        tokens, targets = np.zeros(shape, "int32"), np.zeros(shape, "int32")
        weights = np.zeros(shape, "float32")
        reset = np.ones(self.batch_size, bool)
        for row, segments in enumerate(self._rows):
            if index >= len(segments):
                continue
            document, start = segments[index]
            piece = document[start : start + self.length + 1]
            count = len(piece) - 1
            tokens[row, :count], targets[row, :count] = piece[:-1], piece[1:]
            weights[row, :count] = 1.0
            reset[row] = start == 0
        return {"token_ids": tokens, "reset": reset}, targets, weights


def _equal_pieces(text, count):
    """`count` equal pieces; each ends with the first token of the next."""
    length = (len(text) - 1) // count
    return [text[i * length : (i + 1) * length + 1] for i in range(count)]
