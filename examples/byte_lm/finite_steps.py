"""Skips training steps that would produce non-finite values."""

import keras
from keras import ops


def keep_finite(model):
    """Makes a step with NaN or infinity leave the model unchanged.

    This covers all variables: weights, statistics, random seeds, metrics and the
    optimizer's. The `loss` in the logs of such a step is NaN.

    Args:
        model: A compiled model; it is changed.
    """
    train_step = model.train_step

    def stateless_step(state, data):
        logs, new = train_step(state, data)
        finite = _all_finite(keras.tree.flatten(new))
        new = keras.tree.map_structure(
            lambda value, old: ops.where(finite, value, old), new, state
        )
        return _mark(logs, finite), new

    def step(data):
        variables = _variables(model)
        old = [ops.copy(ops.stop_gradient(variable)) for variable in variables]
        logs = train_step(data)
        finite = _all_finite(variables)
        for variable, value in zip(variables, old, strict=True):
            variable.assign(ops.where(finite, variable, value))
        return _mark(logs, finite)

    stateless = keras.backend.backend() == "jax"
    model.train_step = stateless_step if stateless else step


def _variables(model):
    """All variables that a step changes; the metrics include the loss."""
    return [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]


def _all_finite(values):
    floating = [value for value in values if "float" in str(value.dtype)]
    return ops.all(ops.stack([ops.all(ops.isfinite(value)) for value in floating]))


def _mark(logs, finite):
    return {**logs, "loss": ops.where(finite, logs["loss"], float("nan"))}
