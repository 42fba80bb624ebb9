"""The halting unit of adaptive computation time, and the cost of pondering."""

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments, dense_layer
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.layers.residual.reversible import stream_dtype
from keras_efficient_attn.ops.adaptive_computation import adaptive_computation
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_number,
    check_positive_int,
    check_rate,
    check_weight,
)
from keras_efficient_attn.ops.common.numerics import at_least

REDUCTIONS = ("mean", "sum")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class Halting(KeepsQuantization, KeepsArguments, keras.layers.Layer):
    """The part of `AdaptiveComputationTime` that does not depend on the step.

    Args:
        max_steps, epsilon, ponder_cost, halting_bias, early_exit, ponder_reduction: As
            for `AdaptiveComputationTime`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Raises:
        ValueError: For an argument out of range.
    """

    def __init__(
        self,
        max_steps,
        epsilon=0.01,
        ponder_cost=0.01,
        halting_bias=1.0,
        early_exit=True,
        ponder_reduction="mean",
        **kwargs,
    ):
        super().__init__(autocast=False, **kwargs)
        check_positive_int("max_steps", max_steps)
        check_rate("epsilon", epsilon)
        check_weight("ponder_cost", ponder_cost)
        check_number("halting_bias", halting_bias)
        check_bool("early_exit", early_exit)
        check_name("ponder_reduction", ponder_reduction, REDUCTIONS)
        self.keep(locals())
        # In half precision the probabilities would not sum to 1.
        self.unit = dense_layer(
            1,
            activation="sigmoid",
            bias_initializer=keras.initializers.Constant(halting_bias),
            dtype=stream_dtype(self),
            name="unit",
        )

    def build(self, input_shape):
        self.unit.build(input_shape)

    def ponder(self, step, state, read, running, training):
        """The weighted states, and the statistics of `adaptive_computation`.

        Args:
            step: Callable `(n, state) -> state`.
            state: Tensor or nest of tensors.
            read: Callable from a state to the tensor `(..., dim)` that the unit reads.
            running: Boolean `(...)`, false where a position starts halted.
            training: Boolean. With it, all steps are computed.
        """

        def step_and_probability(n, state):
            state = step(n, state)
            return state, ops.squeeze(self.unit(read(state)), axis=-1)

        return adaptive_computation(
            step_and_probability,
            state,
            running,
            self.max_steps,
            self.epsilon,
            early_exit=self.early_exit and not training,
            dtype=self.unit.compute_dtype,
        )

    def cost(self, ponder, running):
        """`ponder_cost` times N + R, reduced over the positions that ran.

        Args:
            ponder: The statistics; those of positions that did not run are 0.
            running: Boolean, of the shape of the statistics.
        """
        total = ops.sum(ponder["steps"] + ponder["remainders"])
        if self.ponder_reduction == "mean":
            count = ops.sum(ops.cast(running, total.dtype))
        else:
            count = ops.cast(shape_of(running)[0], total.dtype)
        return self.ponder_cost * total / at_least(count, 1)

    def specification(self, shape):
        """The shapes and dtypes of the statistics, for positions of this shape."""
        dtype = self.unit.compute_dtype
        return {
            "steps": keras.KerasTensor(shape, dtype=dtype),
            "remainders": keras.KerasTensor(shape, dtype=dtype),
            "probabilities": keras.KerasTensor((*shape, self.max_steps), dtype=dtype),
        }
