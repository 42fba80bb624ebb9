"""An RNN with an adaptive-computation cell, which adds the ponder cost."""

import keras
from keras import ops

from keras_efficient_attn.layers.adaptive_computation.layer import (
    AdaptiveComputationTime,
)
from keras_efficient_attn.layers.arguments import serialize_shared
from keras_efficient_attn.layers.replicas import ReplicaLosses
from keras_efficient_attn.layers.residual.reversible import stream_dtype
from keras_efficient_attn.ops.common.backend import shape_of


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class AdaptiveRNN(ReplicaLosses, keras.layers.RNN):
    """`keras.layers.RNN` of an `AdaptiveComputationTime` cell, with its ponder cost.

    The loss is `ponder_cost` times the mean of N + R over all positions that are not
    masked. Masked positions start halted: they take no step and may be NaN.

    Args:
        cell: An `AdaptiveComputationTime` around the cell of an RNN.
        *args, **kwargs: Arguments of `keras.layers.RNN`.

    Call arguments:
        sequences: `(batch, length, dim)`.
        initial_state: Optional states of the cell.
        mask: Optional boolean `(batch, length)`.
        training: Boolean.
        return_ponder: Whether to return, as the last output, the dict of float32
            `steps`, `remainders`, `(batch, length)`, and `probabilities`, `(batch,
            length, max_steps)`, as `AdaptiveComputationTime` does.

    Returns:
        As `keras.layers.RNN`; with `return_ponder` also the dict.

    Raises:
        TypeError: If `cell` is not an `AdaptiveComputationTime` around a cell.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import AdaptiveComputationTime, AdaptiveRNN
    >>> cell = AdaptiveComputationTime(keras.layers.LSTMCell(16), max_steps=10)
    >>> layer = AdaptiveRNN(cell, return_sequences=True)
    >>> x = keras.random.normal((2, 5, 3))
    >>> y, ponder = layer(x, return_ponder=True)
    >>> y.shape, ponder["steps"].shape
    ((2, 5, 16), (2, 5))

    Reference:
        - [Graves, 2016](https://arxiv.org/abs/1603.08983)
    """

    def __init__(self, cell, *args, **kwargs):
        if not (isinstance(cell, AdaptiveComputationTime) and cell.is_cell):
            raise TypeError(
                "`cell` must be an `AdaptiveComputationTime` around the cell of an "
                f"RNN. Received: cell={cell!r}"
            )
        super().__init__(cell, *args, **kwargs)
        # Keep statistics and states in float32 between positions.
        self._loop = keras.layers.RNN(
            _ReportingCell(cell, dtype=stream_dtype(self)),
            return_sequences=True,
            return_state=True,
            go_backwards=self.go_backwards,
            unroll=self.unroll,
            dtype=stream_dtype(self),
            name="loop",
        )

    def build(self, sequences_shape, initial_state_shape=None):
        super().build(sequences_shape)
        self._loop.build((*sequences_shape[:-1], sequences_shape[-1] + 1))

    def call(
        self,
        sequences,
        initial_state=None,
        mask=None,
        training=False,
        return_ponder=False,
    ):
        running = ops.ones_like(sequences[..., 0], dtype="bool")
        if mask is not None:
            running = ops.logical_and(running, ops.cast(mask, "bool"))
            sequences = ops.where(
                running[..., None], sequences, ops.zeros_like(sequences)
            )
        if initial_state is None and self.stateful:
            initial_state = self.states
        elif initial_state is None:
            initial_state = self.get_initial_state(shape_of(sequences)[0])
        if not keras.tree.is_nested(initial_state):
            initial_state = [initial_state]
        initial_state = keras.tree.map_structure(
            lambda x: ops.cast(x, self._loop.compute_dtype), list(initial_state)
        )
        # A cell's dropout mask is drawn before the loop and the same at all positions.
        step = self.cell.step
        like = keras.tree.map_structure(
            lambda x: ops.cast(x, step.compute_dtype),
            (self.cell.add_flag(sequences[:, 0], 0), initial_state),
        )
        self._maybe_config_dropout_masks(step, *like)
        reports, *states = self._loop(
            ops.concatenate(
                [sequences, ops.cast(running, sequences.dtype)[..., None]], axis=-1
            ),
            initial_state=[*initial_state, _first_output(self.cell, sequences)],
            training=training,
        )
        self._maybe_reset_dropout_masks(step)
        states = keras.tree.map_structure(
            lambda x: ops.cast(x, self.compute_dtype), states[:-1]
        )
        outputs, ponder = self._read(reports)
        if self.cell.halting.ponder_cost:
            self.add_loss(self.cell.halting.cost(ponder, running))
        if self.zero_output_for_mask:
            ran = ops.flip(running, axis=1) if self.go_backwards else running
            outputs = ops.where(ran[..., None], outputs, ops.zeros_like(outputs))
        if self.stateful:
            for own, new in zip(
                keras.tree.flatten(self.states),
                keras.tree.flatten(states),
                strict=True,
            ):
                own.assign(new)
        results = [outputs if self.return_sequences else outputs[:, -1]]
        if self.return_state:
            results += states
        if return_ponder:
            results.append(ponder)
        return results[0] if len(results) == 1 else tuple(results)

    def _read(self, reports):
        """Outputs, and the statistics of each position in the order of the inputs."""
        units = self.cell.output_size
        outputs = ops.cast(reports[..., :units], self.compute_dtype)
        if self.go_backwards:
            reports = ops.flip(reports, axis=1)
        ponder = {
            "steps": reports[..., units],
            "remainders": reports[..., units + 1],
            "probabilities": reports[..., units + 2 :],
        }
        return outputs, ponder

    def compute_output_spec(self, sequences, *args, return_ponder=False, **kwargs):
        shapes = self.compute_output_shape(sequences.shape)
        shapes = list(shapes) if self.return_state else [shapes]
        results = [_specification(shape, self.compute_dtype) for shape in shapes]
        if return_ponder:
            results.append(self.cell.halting.specification(sequences.shape[:2]))
        return results[0] if len(results) == 1 else tuple(results)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class _ReportingCell(keras.layers.Layer):
    """A cell that appends the statistics to its output's channels.

    The last input channel is 0 for rows that start halted; these rows keep their output
    and states.
    """

    def __init__(self, cell, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.cell = cell
        size = cell.state_size
        sizes = list(size) if isinstance(size, list | tuple) else [size]
        self.state_size = [*sizes, cell.output_size]
        self.output_size = cell.output_size + 2 + cell.halting.max_steps

    def build(self, input_shape):
        pass

    def call(self, inputs, states, training=None):
        running = inputs[:, -1] > 0
        *states, last = states
        output, new_states, ponder = self.cell.ponder_cell(
            inputs[:, :-1], states, running, training
        )
        output = ops.where(running[:, None], ops.cast(output, last.dtype), last)
        states = keras.tree.map_structure(
            lambda new, old: ops.where(running[:, None], new, old), new_states, states
        )
        report = [
            output,
            ponder["steps"][:, None],
            ponder["remainders"][:, None],
            ponder["probabilities"],
        ]
        return ops.concatenate(report, axis=-1), [*states, output]

    def get_config(self):
        cell = serialize_shared(self.cell)
        return {**super().get_config(), "cell": cell}


def _first_output(cell, sequences):
    """Zeros, which masked positions before the first real one repeat."""
    column = ops.zeros_like(sequences[:, 0, :1], dtype=stream_dtype(cell))
    return ops.repeat(column, cell.output_size, axis=1)


def _specification(shape, dtype):
    if isinstance(shape, list):
        return [keras.KerasTensor(each, dtype=dtype) for each in shape]
    return keras.KerasTensor(shape, dtype=dtype)
