"""Maps attention along any axes of a tensor to attention along one sequence."""

import dataclasses
import functools
import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of


@dataclasses.dataclass(frozen=True)
class SequenceAxes:
    """The axes of `(batch, ..., dim)` that form the sequence; others join the batch.

    Args:
        rank: Number of axes of the inputs.
        axes: The axes attended to, a tuple of integers from 1 to `rank - 2`.
    """

    rank: int
    axes: tuple

    @classmethod
    @functools.cache
    def of(cls, rank, axes):
        """Makes the axes of inputs of a rank; `None`: all between batch and features.

        Raises:
            ValueError: If an axis is the batch, the features, or does not exist.
        """
        if rank < 3:
            raise ValueError(
                "`query` must have the shape (batch, ..., dim), with at least one axis "
                f"to attend along. Received: a query of rank {rank}"
            )
        chosen = range(1, rank - 1) if axes is None else axes
        chosen = tuple(axis % rank if -rank <= axis < rank else axis for axis in chosen)
        repeated = len(set(chosen)) < len(chosen)
        if not chosen or repeated or any(not 1 <= axis <= rank - 2 for axis in chosen):
            raise ValueError(
                "`attention_axes` must be different axes between the batch and the "
                f"features. Received: attention_axes={axes} for inputs of rank {rank}"
            )
        return cls(rank, chosen)

    @property
    def is_sequence(self):
        """Whether inputs already are `(batch, length, dim)`."""
        return self.rank == 3

    @property
    def batch_axes(self):
        """The axes that join the batch."""
        return tuple(axis for axis in range(1, self.rank - 1) if axis not in self.axes)

    def sequence_shape(self, shape):
        """`(rows, length, dim)` of inputs of that shape; `None` where unknown."""
        shape = tuple(shape)

        def product(axes):
            sizes = [shape[axis] for axis in axes]
            return None if None in sizes else math.prod(sizes)

        return product((0, *self.batch_axes)), product(self.axes), shape[-1]

    def to_sequence(self, x):
        """`(batch, ..., dim)` as `(rows, length, dim)`."""
        if self.is_sequence:
            return x
        sizes = shape_of(x)
        rows = math.prod(sizes[axis] for axis in (0, *self.batch_axes))
        length = math.prod(sizes[axis] for axis in self.axes)
        x = ops.transpose(x, self._order)
        return ops.reshape(x, (rows, length, sizes[-1]))

    def mask_to_sequence(self, mask):
        """`(batch, ...)` as `(rows, length)`."""
        if mask is None or self.is_sequence:
            return mask
        return self.to_sequence(mask[..., None])[..., 0]

    def from_sequence(self, x, like):
        """`(rows, length, ...)` with the axes that `like` `(batch, ..., dim)` has."""
        if self.is_sequence:
            return x
        sizes = shape_of(like)
        tail = shape_of(x)[2:]
        x = ops.reshape(x, (*(sizes[axis] for axis in self._order[:-1]), *tail))
        inner = len(self._order) - 1
        back = sorted(range(inner), key=self._order.__getitem__)
        return ops.transpose(x, (*back, *range(inner, inner + len(tail))))

    def scores_from_sequence(self, scores, query, key):
        """`(rows, heads, T, S)` with the axes of the inputs: rows, heads, T and S."""
        if self.is_sequence:
            return scores
        queries, keys = shape_of(query), shape_of(key)
        heads = shape_of(scores)[1]
        return ops.reshape(scores, self._scores_shape(queries, keys, heads))

    def scores_shape(self, query_shape, key_shape, heads):
        """The shape of scores; `None` where unknown."""
        return self._scores_shape(tuple(query_shape), tuple(key_shape), heads)

    def _scores_shape(self, queries, keys, heads):
        return (
            *(queries[axis] for axis in (0, *self.batch_axes)),
            heads,
            *(queries[axis] for axis in self.axes),
            *(keys[axis] for axis in self.axes),
        )

    @property
    def _order(self):
        return (0, *self.batch_axes, *self.axes, self.rank - 1)
