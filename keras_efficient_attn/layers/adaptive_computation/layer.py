"""Adaptive computation time around a layer, or around the cell of an RNN."""

import inspect

import keras
from keras import ops

from keras_efficient_attn.layers.adaptive_computation.halting import Halting
from keras_efficient_attn.layers.arguments import build_layer, serialize_shared
from keras_efficient_attn.layers.replicas import ReplicaLosses


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class AdaptiveComputationTime(ReplicaLosses, keras.layers.Layer):
    """Repeats a step with the same weights, a learned number of times per position.

    ```
    sₙ = step(sₙ₋₁)                     s₀ is the input
    hₙ = sigmoid(w · sₙ + b)
    N = min(max_steps, min{n: h₁ + … + hₙ ≥ 1 − epsilon})
    R = 1 − (h₁ + … + h_{N−1})
    output = h₁ s₁ + … + h_{N−1} s_{N−1} + R s_N
    loss += ponder_cost · mean(N + R)                      or the sum over positions
    ```

    The weights of the states sum to exactly 1. A position that has halted keeps its
    state `s_N`, which steps with attention still see. Halting is computed in float32 or
    wider, whatever the policy. No gradient goes through N.

    In training, all `max_steps` steps are computed, one after the other. Otherwise the
    loop ends when the last position has halted: time is saved where a whole batch halts
    early, and the result is the same.

    **In an RNN.** If `step` is the cell of an RNN (`SimpleRNNCell`, `LSTMCell`,
    `GRUCell`, `StackedRNNCells`), this layer is a cell too. Each step gets the same
    input, with a flag that is 1 in the first step and 0 in the others. The halting unit
    reads the cell's output. Output and states are weighted means. Wrap it in
    `keras_efficient_attn.AdaptiveRNN`, a `keras.layers.RNN` that adds the ponder cost.
    With `ponder_cost=0` and cells without dropout it works in `keras.layers.RNN`
    itself, whose loop cannot return a loss.

    Args:
        step: Layer from `(batch, ..., dim)` to the same shape, or the cell of an RNN.
            The layer receives `mask` if its call has that argument.
        max_steps: Maximum number of steps per position.
        epsilon: A position halts when its probabilities sum to `1 − epsilon`, so that
            one step can be enough. Defaults to 0.01.
        ponder_cost: Weight of the loss. Defaults to 0.01.
        halting_bias: Initial `b`. At 1 a new layer takes about 2 steps, at −3 about 20.
            Training has been found to lower the number of steps more reliably than to
            raise it. Defaults to 1.
        input_flag: Whether the input of a cell gets the flag. Defaults to `None`: only
            for cells.
        early_exit: Whether calls without `training` stop early. Set `False` to take
            their gradient on JAX, or under XLA on TensorFlow. Defaults to `True`.
        ponder_reduction: `"mean"` (the default): the loss is the mean of `N + R` over
            all unmasked positions. `"sum"`: the sum over the positions of a sequence,
            as in the paper, and the mean over the batch.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: `(batch, ..., dim)`; for a cell, `(batch, dim)`.
        states: States of the cell, for a cell.
        mask: Optional boolean `(batch, ...)`. Masked positions start halted and are
            never read: they may be NaN, their output is 0, and they cost nothing.
        training: Boolean.
        return_ponder: Whether to return `(output, ponder)`, a dict of float32 `steps` N
            and `remainders` R, `(batch, ...)`, and `probabilities`, the weights of the
            steps, `(batch, ..., max_steps)`; all 0 where masked.

    Returns:
        A tensor of the shape of `inputs`; for a cell, `(output, states)` or `(output,
        states, ponder)`.

    Raises:
        TypeError: If `step` is not a layer.
        ValueError: For an argument out of range, a step that changes the shape, or a
            call as a cell with a `ponder_cost` or a dropout that would have no effect.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import AdaptiveComputationTime
    >>> layer = AdaptiveComputationTime(keras.layers.Dense(16, "tanh"), max_steps=8)
    >>> x = keras.random.normal((2, 10, 16))
    >>> y, ponder = layer(x, return_ponder=True)
    >>> ponder["steps"].shape
    (2, 10)

    Reference:
        - [Graves, 2016](https://arxiv.org/abs/1603.08983)
    """

    def __init__(
        self,
        step,
        max_steps,
        epsilon: float = 0.01,
        ponder_cost: float = 0.01,
        halting_bias: float = 1.0,
        input_flag=None,
        early_exit: bool = True,
        ponder_reduction: str = "mean",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not isinstance(step, keras.Layer):
            raise TypeError(f"`step` must be a layer. Received: step={step!r}")
        self.step = step
        self.is_cell = getattr(step, "state_size", None) is not None
        if input_flag is not None and not self.is_cell:
            raise ValueError(
                "`input_flag` needs a `step` that is the cell of an RNN. Received: "
                f"input_flag={input_flag!r}, step={step!r}"
            )
        self.input_flag = self.is_cell if input_flag is None else input_flag
        self.halting = Halting(
            max_steps,
            epsilon,
            ponder_cost,
            halting_bias,
            early_exit,
            ponder_reduction,
            dtype=self.dtype_policy,
            name="halting",
        )
        self.supports_masking = not self.is_cell
        self._step_takes = frozenset(inspect.signature(step.call).parameters)

    def build(self, input_shape):
        if self.is_cell:
            flag = int(self.input_flag)
            if not self.step.built:
                self.step.build((*input_shape[:-1], input_shape[-1] + flag))
            self.halting.build((input_shape[0], self.output_size))
            return
        build_layer(self.step, input_shape, self.compute_dtype)
        output_shape = self.step.compute_output_shape(input_shape)
        if tuple(output_shape) != tuple(input_shape):
            raise ValueError(
                "The output of `step` must have the shape of its input, because the "
                f"step is repeated. Received: step={self.step!r}, from "
                f"{tuple(input_shape)} to {tuple(output_shape)}"
            )
        self.halting.build(input_shape)

    def call(self, inputs, states=None, mask=None, training=None, return_ponder=False):
        if self.is_cell:
            self._check_cell_call(mask, training)
            output, states, ponder = self.ponder_cell(
                inputs, states, ops.ones_like(inputs[:, 0], dtype="bool"), training
            )
            return (output, states, ponder) if return_ponder else (output, states)
        if states is not None:
            raise ValueError(
                "`states` needs a `step` that is the cell of an RNN. Received: "
                f"step={self.step!r}"
            )
        running = ops.ones_like(inputs[..., 0], dtype="bool")
        options = {"training": training} if "training" in self._step_takes else {}
        if mask is not None:
            running = ops.logical_and(running, ops.cast(mask, "bool"))
            inputs = ops.where(running[..., None], inputs, ops.zeros_like(inputs))
            if "mask" in self._step_takes:
                options["mask"] = running
        output, ponder = self.halting.ponder(
            lambda n, state: self.step(state, **options),
            inputs,
            lambda state: state,
            running,
            training,
        )
        if self.halting.ponder_cost:
            self.add_loss(self.halting.cost(ponder, running))
        output = ops.cast(output, self.compute_dtype)
        return (output, ponder) if return_ponder else output

    # Methods for use as an RNN cell.

    @property
    def state_size(self):
        """Sizes of the cell's states; `None` if the step is not a cell."""
        return getattr(self.step, "state_size", None)

    @property
    def output_size(self):
        """Width of the cell's output; `None` if the step is not a cell."""
        size = getattr(self.step, "output_size", None)
        return keras.tree.flatten(self.state_size)[0] if size is None else size

    def get_initial_state(self, batch_size=None):
        """The states of the cell before the first position."""
        if hasattr(self.step, "get_initial_state"):
            return self.step.get_initial_state(batch_size=batch_size)
        return keras.tree.map_structure(
            lambda size: ops.zeros((batch_size, size), self.compute_dtype),
            self.state_size,
        )

    def ponder_cell(self, inputs, states, running, training):
        """Computes one position of an RNN, without adding the loss.

        Args:
            inputs: `(batch, dim)`.
            states: States of the cell.
            running: Boolean `(batch,)`, false for rows that start halted.
            training: Boolean.

        Returns:
            `(output, states, ponder)`; a row that started halted has output and states
            0.
        """
        options = {}
        if "training" in self._step_takes:
            options["training"] = bool(training)

        def step(n, state):
            return self.step(self.add_flag(inputs, n), state[1], **options)

        output = ops.zeros_like(
            ops.repeat(inputs[:, :1], self.output_size, axis=1),
            dtype=self.compute_dtype,
        )
        (output, new_states), ponder = self.halting.ponder(
            step, (output, states), lambda state: state[0], running, training
        )
        new_states = keras.tree.map_structure(
            lambda new, old: ops.cast(new, old.dtype), new_states, states
        )
        return ops.cast(output, self.compute_dtype), new_states, ponder

    def add_flag(self, inputs, n):
        """The inputs of step n."""
        if not self.input_flag:
            return inputs
        flag = ops.cast(ops.equal(n, 0), inputs.dtype) * ops.ones_like(inputs[:, :1])
        return ops.concatenate([inputs, flag], axis=-1)

    def _check_cell_call(self, mask, training):
        if mask is not None:
            raise ValueError(
                "A cell takes no `mask`: pass it to the RNN. Received: a mask"
            )
        if self.halting.ponder_cost:
            raise ValueError(
                "`keras.layers.RNN` drops the losses of its cell: use "
                "`keras_efficient_attn.AdaptiveRNN`, or `ponder_cost=0`. Received: "
                f"ponder_cost={self.halting.ponder_cost}"
            )
        if training and _has_dropout(self.step):
            raise ValueError(
                "`keras.layers.RNN` does not support dropout in a cell that is inside "
                "another cell: use `keras_efficient_attn.AdaptiveRNN`. Received: a "
                "`step` with dropout"
            )

    def compute_output_spec(
        self, inputs, states=None, mask=None, training=None, return_ponder=False
    ):
        if not self.is_cell:
            output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
            ponder = self.halting.specification(inputs.shape[:-1])
            return (output, ponder) if return_ponder else output
        output = keras.KerasTensor(
            (inputs.shape[0], self.output_size), dtype=self.compute_dtype
        )
        states = keras.tree.map_structure(
            lambda state: keras.KerasTensor(state.shape, dtype=state.dtype), states
        )
        ponder = self.halting.specification(inputs.shape[:1])
        return (output, states, ponder) if return_ponder else (output, states)

    def get_config(self):
        return {
            **super().get_config(),
            "step": serialize_shared(self.step),
            **self.halting.kept_arguments(),
            "input_flag": self.input_flag if self.is_cell else None,
        }

    @classmethod
    def from_config(cls, config):
        step = keras.saving.deserialize_keras_object(config["step"])
        return super().from_config({**config, "step": step})


def _has_dropout(cell):
    cells = getattr(cell, "cells", (cell,))
    names = ("dropout", "recurrent_dropout")
    return any(getattr(each, name, 0) for each in cells for name in names)
