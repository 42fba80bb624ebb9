"""Adaptive computation time: a learned number of steps per position."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import is_traced, shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.plan import symbolic


@symbolic
def adaptive_computation(
    step,
    state,
    running,
    max_steps,
    epsilon: float = 0.01,
    early_exit: bool = False,
    dtype="float32",
):
    """Repeats a step until each position has halted; gives the weighted mean state.

    ```
    N = min(max_steps, min{n: h₁ + … + hₙ ≥ 1 − epsilon})
    R = 1 − (h₁ + … + h_{N−1})
    pₙ = hₙ for n < N,  p_N = R
    output = Σₙ pₙ sₙ
    ```

    `pₙ` in the order of the steps sum to exactly 1. A halted position keeps its last
    state, for steps that read other positions. No gradient goes through N: the gradient
    of `N + R` is −1 for each `hₙ` with n < N, and 0 for the others.

    In a Functional model, `step` must not have weights, which the model would not
    train or save: use the layer `AdaptiveComputationTime`.

    Args:
        step: Callable `(n, state) -> (state, probability)` of the step number n, from
            0, and the states; `hₙ` has the shape of `running`. In a while loop n is a
            tensor.
        state: Tensor, or nest of tensors, whose shapes begin with that of `running`.
        running: Boolean: false where a position starts halted. Its state is passed to
            the step and never changes; its output is 0.
        max_steps: Maximum number of steps.
        epsilon: A position halts when its probabilities sum to `1 − epsilon`. Defaults
            to 0.01.
        early_exit: Whether to stop as soon as no position runs. This is a while loop,
            which has no gradient on JAX, nor under XLA on TensorFlow. Otherwise all
            steps are computed. Defaults to `False`.
        dtype: Dtype of the sums. Defaults to `"float32"`.

    Returns:
        `(output, ponder)`: `Σ pₙ sₙ` as `state`, of `dtype`, and a dict of `steps` N
        and `remainders` R, of the shape of `running`, and `probabilities` p, with an
        additional axis of length `max_steps`; all are 0 where a position started
        halted.

    Raises:
        ValueError: If `max_steps` is not a positive integer.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.ops import adaptive_computation
    >>> state = keras.ops.zeros((2, 1))
    >>> output, ponder = adaptive_computation(
    ...     lambda n, state: (state + 1, keras.ops.full((2,), 0.4)),
    ...     state, keras.ops.ones((2,), "bool"), max_steps=10,
    ... )
    >>> [int(steps) for steps in ponder["steps"]]
    [3, 3]
    >>> round(float(output[0, 0]), 3)  # 0.4 · 1 + 0.4 · 2 + 0.2 · 3
    1.8

    Reference:
        - [Graves, 2016](https://arxiv.org/abs/1603.08983)
    """
    check_positive_int("max_steps", max_steps)
    running = ops.cast(running, "bool")
    zeros = ops.zeros_like(running, dtype=dtype)
    weighted = keras.tree.map_structure(lambda s: ops.zeros_like(s, dtype=dtype), state)
    probabilities = zeros[..., None] * ops.zeros((max_steps,), dtype)
    carry = (state, weighted, running, zeros, zeros, zeros, probabilities)

    def body(n, carry):
        state, weighted, running, total, steps, remainders, probabilities = carry
        new_state, probability = step(n, state)
        probability = ops.cast(probability, dtype)
        ends = ops.logical_or(
            total + probability >= 1 - epsilon, ops.equal(n, max_steps - 1)
        )
        ends = ops.logical_and(running, ends)
        goes_on = ops.logical_and(running, ops.logical_not(ends))
        weight = ops.where(goes_on, probability, ops.where(ends, 1 - total, zeros))
        state = _where(running, new_state, state)
        return (
            state,
            keras.tree.map_structure(
                lambda total, s: total + _spread(weight, s) * ops.cast(s, dtype),
                weighted,
                state,
            ),
            goes_on,
            ops.where(goes_on, total + probability, total),
            steps + ops.cast(running, dtype),
            ops.where(ends, 1 - total, remainders),
            probabilities + weight[..., None] * ops.one_hot(n, max_steps, dtype=dtype),
        )

    def any_runs(carry):
        return ops.any(carry[2])

    if not early_exit:
        for n in range(max_steps):
            carry = body(n, carry)
    elif not any(map(is_traced, keras.tree.flatten(carry))):
        n = 0
        while n < max_steps and any_runs(carry):
            carry = body(n, carry)
            n += 1
    else:
        _, carry = ops.while_loop(
            lambda n, carry: ops.logical_and(n < max_steps, any_runs(carry)),
            lambda n, carry: (n + 1, body(n, carry)),
            (ops.convert_to_tensor(0, "int32"), carry),
        )
    _, weighted, _, _, steps, remainders, probabilities = carry
    ponder = {
        "steps": steps,
        "remainders": remainders,
        "probabilities": probabilities,
    }
    return weighted, ponder


def _where(running, new_state, state):
    """The new state where positions run, else the old state."""
    new = keras.tree.flatten(new_state)
    merged = [
        # A loop needs the same static shapes after each step.
        ops.where(
            _spread(running, old),
            ops.reshape(ops.cast(fresh, old.dtype), shape_of(old)),
            old,
        )
        for old, fresh in zip(keras.tree.flatten(state), new, strict=True)
    ]
    return keras.tree.pack_sequence_as(state, merged)


def _spread(x, like):
    """`x` with axes of length 1 at its end, to broadcast with `like`."""
    for _ in range(len(like.shape) - len(x.shape)):
        x = x[..., None]
    return x
