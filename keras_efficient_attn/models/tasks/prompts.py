"""Prompts of different lengths, and how they are read and completed."""

import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.numerics import at_least
from keras_efficient_attn.ops.common.rows import RowOrder, row_lengths, take_rows

# Lengths of the segments in which prompts are read: multiples of the last.
SEGMENT_LENGTHS = (1024, 128, 16)


class Prompts:
    """The prompts of a batch, and the rows in which a sampler sees them.

    Each step of a sampler gives every row a token. In its rows all prompts therefore
    end before one column, `index`, the length of the shortest; of longer ones it sees
    the end only. A sampler that compares a token with all before it gets rows of twice
    the length, with whole prompts.

    Args:
        token_ids: Integers `(batch, max_length)`.
        padding_mask: `(batch, max_length)`, 1 at prompt tokens, anywhere in a row. An
            empty prompt starts from the padding token.
        sampler: A sampler of KerasHub.

    Attributes:
        order: The `RowOrder` that moves prompts to the front.
        token_ids: Integers `(batch, max_length)`: prompts from the first position on.
        lengths: Integers `(batch,)`, at least 1.
        index: The column before which prompts end in `rows`, an integer of no axis.
        end: The column before which they end when they are read. All tokens but the
            last fill whole segments up to there.
        rows: Integers `(batch, columns)`, the tokens that the sampler sees.
        mask: Boolean, of that shape: the columns before `index`.
        compares: Whether the sampler needs the hidden states of its rows.
    """

    def __init__(self, token_ids, padding_mask, sampler):
        self.order = RowOrder.of(padding_mask)
        self._given = row_lengths(padding_mask)[:, None]
        self.token_ids = self.order.to_front(token_ids)
        self.lengths = at_least(row_lengths(padding_mask), 1)
        max_length = shape_of(token_ids)[1]
        shortest = SEGMENT_LENGTHS[-1]
        longest = ops.cast(ops.max(self.lengths, initial=1), "int32")
        self.end = (longest - 1 + shortest - 1) // shortest * shortest + 1
        self.index = ops.cast(ops.min(self.lengths, initial=max_length), "int32")
        self.compares = isinstance(sampler, keras_hub.samplers.ContrastiveSampler)
        columns = max_length
        if self.compares:
            self.index, columns = self.index + max_length, 2 * max_length
        self._place = self.places(self.index, columns)
        self.rows = take_rows(self._place, self.token_ids)[0]
        columns = ops.arange(columns, dtype="int32")
        self.mask = ops.broadcast_to(columns < self.index, shape_of(self.rows))

    def places(self, end, columns):
        """The position of each column if prompts end before column `end`.

        The nearest position of the row where it has none: `(batch, columns)`.
        """
        last = shape_of(self.token_ids)[1] - 1
        columns = ops.arange(columns, dtype="int32")
        return ops.clip(columns + (self.lengths[:, None] - end), 0, last)

    def to_rows(self, x):
        """`(batch, max_length, ...)` of prompts at the front, in the sampler's rows."""
        return take_rows(self._place, x)[0]

    def read(self, read, cache):
        """The cache after all tokens but the last of each prompt.

        Args:
            read: Called with the tokens of a segment and whether they exist, both
                `(batch, length)`, a cache, and the segment's first column; returns the
                next cache.
            cache: The cache before the first token, a nest of tensors.
        """
        batch_size, max_length = shape_of(self.token_ids)
        columns = max_length + SEGMENT_LENGTHS[-1]
        token_ids = take_rows(self.places(self.end, columns), self.token_ids)[0]
        first = (self.end - self.lengths)[:, None]
        start = ops.zeros((), "int32")
        for length in SEGMENT_LENGTHS:
            if length > columns:
                continue
            steps = ops.arange(length, dtype="int32")

            def is_left(start, cache, length=length):
                return start + length < self.end

            def read_segment(start, cache, length=length, steps=steps):
                segment = ops.slice(token_ids, (0, start), (batch_size, length))
                cache = read(segment, start + steps >= first, cache, start)
                return start + length, cache

            start, cache = ops.while_loop(is_left, read_segment, (start, cache))
        return cache

    def complete(self, made, stop_token_ids):
        """The prompts with what a sampler made.

        Args:
            made: Its rows, integers `(batch, columns)`.
            stop_token_ids: Tokens after which a row is padding, or `None`.

        Returns:
            `(token_ids, padding_mask)`, both `(batch, max_length)`: prompts from the
            first position on, followed by the new tokens.
        """
        lengths = self.lengths[:, None]
        steps = ops.arange(shape_of(self.token_ids)[1], dtype="int32")
        column = ops.clip(steps + self.index - lengths, 0, shape_of(made)[1] - 1)
        new = take_rows(column, made)[0]
        token_ids = ops.where(steps < lengths, self.token_ids, new)
        stops = ops.zeros_like(token_ids, dtype="bool")
        for stop in stop_token_ids or ():
            stops = ops.logical_or(stops, ops.equal(token_ids, stop))
        stops = ops.logical_and(stops, steps >= self._given)
        stops = ops.cast(stops, "int32")
        return token_ids, ops.equal(ops.cumsum(stops, axis=-1) - stops, 0)


def stop_rows(logits, done, stop_token_ids):
    """Logits `(batch, vocabulary)` that end rows which are done.

    A row of `max_length` tokens is done before shorter ones are. With no stop tokens,
    its logits are 0.
    """
    stop = ops.zeros_like(logits[:1])
    if stop_token_ids:
        size = logits.shape[-1]
        stop = 100.0 * ops.one_hot([stop_token_ids[0]], size, dtype=stop.dtype)
    return ops.where(done[:, None], stop, logits)


def fit_prompts(inputs, max_length):
    """Inputs of `generate_step` whose rows of prompts have `max_length` places.

    Raises:
        TypeError: If `inputs` is no dict.
        ValueError: If a prompt is longer, or `max_length` is no positive integer.
    """
    check_positive_int("max_length", max_length)
    if not isinstance(inputs, dict):
        raise TypeError(
            "Without a preprocessor, `max_length` needs `inputs` that are a dict of "
            f"token ids and padding mask. Received: inputs={inputs!r}"
        )
    prefix = "decoder_" if "decoder_token_ids" in inputs else ""
    names = f"{prefix}token_ids", f"{prefix}padding_mask"
    tokens, mask = (ops.convert_to_numpy(inputs[name]) for name in names)
    mask = mask.astype(bool)
    longest = int(mask.sum(1).max(initial=0))
    if longest > max_length:
        raise ValueError(
            "A prompt must fit into `max_length`. Received: a prompt of "
            f"{longest} tokens, max_length={max_length}"
        )
    order = np.argsort(~mask, axis=1, kind="stable")
    fit = []
    for x in (tokens, mask.astype("int32")):
        x = np.take_along_axis(x, order, axis=1)[:, :max_length]
        fit.append(np.pad(x, ((0, 0), (0, max_length - x.shape[1]))))
    return {**inputs, **dict(zip(names, fit, strict=True))}
